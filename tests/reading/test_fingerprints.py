"""The fingerprint of a list of sources: the same in each process, as states and ranks count on it."""

import enum
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import pytest
import torch

from stream_dataloader import StreamDataset

SUN = {"sun": 1}
TAGS = ["night", "rain", "city", "fog", "road", "sun"]


class Kind(enum.Enum):
    FILM = "film"


class Text(str, enum.Enum):
    A = "a.mp4"


@dataclass(frozen=True)
class Clip:
    path: str
    tags: frozenset


class Other(Clip):
    pass


class Recording:
    def __init__(self, tags):
        self.tags, self.own = set(tags), self  # which holds itself


class Slotted:
    __slots__ = ("tags",)

    def __init__(self, tags):
        self.tags = set(tags)


class TagSet(set):
    """A set with an attribute."""

    def __init__(self, tags):
        super().__init__(tags)
        self.name = "tags"


def sources():
    """A list of sources for each kind of value."""
    return {
        "set": [set(TAGS), frozenset(TAGS)],
        "nested": [("a.mp4", {"tags": frozenset(TAGS), "pairs": {frozenset(TAGS[:2]), frozenset(TAGS[2:])}})],
        "keys": [{frozenset(TAGS): 1, ("a", frozenset(TAGS)): 2, None: 3, 4: 5}],
        "numbers": [{1, 2.5, "a", b"b", None, (1, 2)}],
        "dataclass": [Clip("a.mp4", frozenset(TAGS))],
        "object": [Recording(TAGS), Slotted(TAGS), SimpleNamespace(tags=set(TAGS))],
        "subclass": [TagSet(TAGS)],
        "object array": [np.array([set(TAGS), "a"], object)],
        "library": [Kind.FILM, datetime(2024, 5, 6), Decimal("1.5"), UUID(int=7), range(3), Path("a"), Text.A],
        "collections": [Counter(TAGS), OrderedDict(a=set(TAGS)), deque([set(TAGS)])],
        "tensors": [torch.arange(3), np.arange(3), np.float32(0.5), np.datetime64("2024-05-06")],
        "function": [json.dumps, Kind],
    }


def orders():
    return list(set(TAGS))


def fingerprints():
    return {name: fingerprint(listed) for name, listed in sources().items()}


def fingerprint(listed):
    return StreamDataset(listed, iter, 1, time_steps=2, seed=0).fingerprint


def test_it_is_the_same_in_a_process_whose_sets_have_another_order():
    code = "import json, test_fingerprints as here; print(json.dumps([here.orders(), here.fingerprints()]))"
    path = os.pathsep.join(map(str, (Path(__file__).parent, *sys.path)))
    for seed in range(1, 9):
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        order, found = json.loads(run.stdout)
        assert found == fingerprints()
        if order != orders():
            return
    raise AssertionError("all sets had one order")


EQUAL = {
    "strings of numpy": (list(np.array(["a", "b"])), ["a", "b"]),
    "bytes of numpy": (list(np.array([b"a"])), [b"a"]),
    "numbers of numpy": ([np.int64(3), np.float64(0.5), np.bool_(True), np.uint8(1)], [3, 0.5, True, 1]),
    "in tuples": ([("a", np.int32(3))], [("a", 3)]),
    "a set and a frozenset": ([{"a", "b"}], [frozenset(["b", "a"])]),
    "the order of a dict": ([{"a": 1, 2: 3}], [{2: 3, "a": 1}]),
    "keys of numpy": ([{np.str_("a"): np.int64(1)}], [{"a": 1}]),
    "paths": ([PurePosixPath("a/b")], [Path("a/b")]),
    "a string that is shared": ([[TAGS[0], TAGS[0]]], [["".join(TAGS[:1]), "night"]]),
    "enumerated strings": ([Text.A], ["a.mp4"]),
}

OTHER = {
    "sets": ([{"a", "b"}], [{"a", "c"}]),
    "a set in a set": ([{frozenset("ab")}], [{frozenset("a"), "b"}]),
    "a set and a list": ([{"a"}], [["a"]]),
    "a string and bytes": (["a"], [b"a"]),
    "objects": ([SimpleNamespace(a=1)], [SimpleNamespace(a=2)]),
    "shapes": ([np.zeros(6)], [np.zeros((2, 3))]),
    "object arrays": ([np.array([{1}], object)], [np.array([{2}], object)]),
    "slots": ([Slotted("a")], [Slotted("b")]),
    "elements of a subclass": ([TagSet("a")], [TagSet("b")]),
    "deques": ([deque([1])], [deque([2])]),
    "functions": ([json.dumps], [json.loads]),
    "dataclasses": ([Clip("a", frozenset())], [Other("a", frozenset())]),
    "members": ([Kind.FILM], ["Kind.FILM"]),
    "times": ([np.datetime64("2024-05-06")], [np.datetime64("2024-05-07")]),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_sources_have_one(kind):
    one, other = EQUAL[kind]
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("kind", OTHER)
def test_other_sources_have_another(kind):
    one, other = OTHER[kind]
    assert fingerprint(one) != fingerprint(other)


class Reducing:
    """Tells pickle of its own accord what builds it."""

    def __init__(self, tags, how):
        self.tags, self.how = set(tags if hasattr(tags, "__iter__") else [str(tags)]), how
        self.title = max(self.tags)

    def __reduce__(self):
        return type(self), (HOW[str(self.how)](self), self.how)


class Frozen(Reducing):
    def __init__(self, tags, how):
        super().__init__(tags, how)
        self.tags = frozenset(self.tags)


class Stating:
    """The same in a state, of slots."""

    __slots__ = ("how", "pairs", "tags", "title")

    def __init__(self, tags, how):
        self.tags, self.how, self.pairs, self.title = frozenset(tags), how, [{"a": set(tags)}], max(tags)

    def __getstate__(self):
        return HOW[str(self.how)](SimpleNamespace(tags=self.pairs[0]["a"], title=self.title)), self.how

    def __setstate__(self, state):
        self.__init__(state[0] if hasattr(state[0], "__iter__") else [str(state[0])], state[1])


HOW = {
    "list": lambda self: list(self.tags),
    "text": lambda self: ",".join(self.tags),
    "first": lambda self: next(iter(self.tags)),
    "address": id,
    "hash": lambda self: hash(self.title),
    "remainder": lambda self: {"bucket": hash(("clip", self.title)) % 1000003},
    "sorted": lambda self: sorted(self.tags),
    "set": lambda self: self.tags,
    "frozen": lambda self: frozenset(list(self.tags)),
    "greatest": lambda self: max(self.tags),
    "by title": lambda self: {self.title: 1, "a": [self.title], f"{self.title}.mp4": self.title.upper()},
    "digest": lambda self: hashlib.sha256("".join(sorted(self.tags)).encode()).hexdigest(),
    "looked up": lambda self: [*sorted(self.tags), f"{self.title in self.tags}", str(SUN.get(self.title))],
}


@pytest.mark.parametrize("kind", [Reducing, Frozen, Stating])
@pytest.mark.parametrize("nested", [lambda one: one, lambda one: ("a.mp4", {"k": [one]}), lambda one: {one}])
@pytest.mark.parametrize("how", list(HOW)[:6])
def test_what_differs_from_process_to_process_is_an_error_that_says_what_to_do(how, nested, kind):
    listed = [nested(kind(TAGS, how))]
    with pytest.raises(
        ValueError, match=rf"a {kind.__qualname__}\) does not always pickle to the same content: .* fingerprint="
    ):
        fingerprint(listed)
    assert StreamDataset(listed, iter, 1, time_steps=2, seed=0, fingerprint="tagged").fingerprint == "tagged"


def test_the_order_of_a_set_is_noticed_whatever_order_a_copy_has():
    """A copy of a set may have the order of the set backwards, in one of some fifty sets of six texts."""
    for number in range(400):
        with pytest.raises(ValueError, match="does not always pickle"):
            fingerprint([Reducing([f"{number} {tag}" for tag in TAGS], "first")])


@pytest.mark.parametrize("kind", [Reducing, Frozen, Stating])
@pytest.mark.parametrize("how", list(HOW)[6:])
def test_what_an_object_tells_pickle_counts_where_it_is_always_the_same(how, kind):
    assert fingerprint([kind(TAGS, how)]) == fingerprint([kind(TAGS[::-1], how)])
    assert fingerprint([kind(TAGS, how)]) != fingerprint([kind(TAGS[:-1], how)])


class Queue(deque):
    """Tells pickle its elements one by one, and has an attribute."""

    def __init__(self, *elements):
        super().__init__(elements)

    def __reduce__(self):
        return Queue, (), None, iter([*self])


class Shelf:
    def __init__(self, *elements):
        self.elements = [*elements]

    def append(self, element):
        self.elements.append(element)

    def __reduce__(self):
        return Shelf, (), None, iter(self.elements)


@pytest.mark.parametrize("kind", [Queue, Shelf])
def test_elements_that_an_object_tells_pickle_one_by_one_count(kind):
    assert fingerprint([kind(1, 2)]) == fingerprint([kind(1, 2)]) != fingerprint([kind(1, 3)])


def test_an_object_that_cannot_be_made_without_its_constructor_counts_as_before():
    class Loaded(list):
        def __reduce__(self):
            return list, (sorted(self),)

    assert fingerprint([Loaded([2, 1])]) == fingerprint([Loaded([1, 2])]) != fingerprint([Loaded([1])])
