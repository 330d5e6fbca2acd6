"""`mark_ends=True`: streams' last steps are marked, and nothing else in the batches changes."""

import copy
import dataclasses
import functools
import itertools
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from cases import Case, Counting
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stream_dataloader import (
    ItemError,
    LengthError,
    ReadError,
    StreamDataLoader,
    StreamDataset,
    StreamError,
    interleave,
)
from stream_dataloader.testing import batch_key, check_resume

CASE = Case([4, 0, 9, 2, 2, 7, 1, 3, 5, 8, 6], 4, 3, shuffle=True, seed=1)


def without_ends(batch):
    """Every other field."""
    return batch_key(dataclasses.replace(batch, is_last=None))


def marked(batches):
    """Source and position of the steps that are marked, in the order of batches and lanes."""
    return [
        cell
        for batch in batches
        for lane in zip(*(field.T.tolist() for field in (batch.source, batch.position, batch.is_last)), strict=True)
        for *cell, last in zip(*lane, strict=True)
        if last
    ]


def check_marks(batches, lengths):
    for batch in batches:
        ends = [[source >= 0 and lengths[source] - 1 for source in row] for row in batch.source.tolist()]
        assert torch.equal(batch.is_last, (batch.source >= 0) & (batch.position == torch.tensor(ends)))


def until_error(loader):
    batches = []
    try:
        for batch in loader:
            batches.append(batch)
    except StreamError as error:
        return batches, error
    return batches, None


def with_marks(build, workers=0, **options):
    """A dataset's batches with marks, up to an error: all else, and the error, are as without."""
    (found, error), (expected, plain) = (
        until_error(StreamDataLoader(build(mark_ends=mark_ends), workers, **options)) for mark_ends in (True, False)
    )
    assert (type(error), str(error)) == (type(plain), str(plain))
    assert list(map(without_ends, found)) == list(map(batch_key, expected))
    return found, error


# In all modes


class Windows:
    """Streams that cut windows, of which any may have no steps; of which kind depends on the source's list."""

    def __call__(self, source):
        index, cuts = source
        begin = 0
        for steps in cuts:
            positions = np.arange(begin, begin + steps)
            yield {"n": 1000 * index + positions, "name": [str(p) for p in positions], "index": index}
            begin += steps


@random_cases(120)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8),
    st.integers(1, 3),
    st.sampled_from(["zeros", "data"]),
    st.booleans(),
)
def test_windows_that_streams_cut_are_marked_at_their_last_step(cuts, lanes, padding_mode, known):
    options = {"lengths": [len(one) for one in cuts]} if known else {}
    build = functools.partial(StreamDataset, list(enumerate(cuts)), Windows(), lanes, padding_mode, seed=0, **options)
    check_marks(with_marks(build)[0], [sum(one) for one in cuts])


@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_workers_mark_windows_that_streams_cut_as_one_process_does(transport):
    windows = [(i, [3] * (i % 4) + [0] * (i % 3) + [1 + i % 3]) for i in range(9)]
    dataset = StreamDataset(windows, Windows(), 4, "data", seed=0, mark_ends=True)
    expected = [batch_key(batch) for batch in StreamDataLoader(dataset)]
    dataset.set_epoch(0)
    assert [batch_key(batch) for batch in StreamDataLoader(dataset, 3, transport=transport)] == expected


def test_lanes_in_groups_and_parts_have_their_marks():
    batches = list(StreamDataLoader(CASE.dataset(mark_ends=True), groups=2))
    check_marks(batches, CASE.lengths)
    assert len(marked(batches)) == 10
    whole = list(StreamDataLoader(CASE.dataset(mark_ends=True)))
    plain = DataLoader(CASE.dataset(mark_ends=True), batch_size=None, num_workers=2)
    for parts in (StreamDataLoader(CASE.dataset(mark_ends=True), 2).parts(), plain):
        for part in parts:
            assert torch.equal(part.is_last, whole[part.step].is_last[:, part.lane])
    for part in StreamDataLoader(CASE.dataset(mark_ends=True), 2, collate_fn=list).parts():
        assert torch.equal(part.is_last, whole[part.step].is_last[:, part.lane])


def test_a_mix_marks_ends_if_its_datasets_do():
    def mix(*marks, **options):
        lengths = itertools.cycle([[3, 1], None])
        datasets = [StreamDataset([3, 1], range, 2, time_steps=2, lengths=next(lengths), mark_ends=m) for m in marks]
        return interleave(datasets, seed=0, **options)

    assert sorted(marked(StreamDataLoader(mix(True, True)))) == [[0, 2], [1, 0], [2, 2], [3, 0]]
    assert len(marked(StreamDataLoader(mix(True, False, mark_ends=True)))) == 4
    with pytest.raises(ValueError, match="mark_ends=True"):
        mix(True, False)
    with pytest.raises((TypeError, ValueError), match="mark_ends must be"):
        StreamDataset([1], range, 1, mark_ends="yes")


# What is taken ahead


def pulls_of(loader):
    """How many items were taken when each batch came."""
    return [loader.dataset.open_stream.pulls for _ in loader]


class Tapping:
    def __init__(self):
        self.pulls = 0

    def __call__(self, length):
        for position in range(length):
            self.pulls += 1
            yield np.arange(position, position + 2)


def test_one_item_is_taken_ahead_and_only_if_its_length_is_not_known():
    def dataset(**options):
        return StreamDataset([5], Tapping(), 1, time_steps=2, **options)

    assert pulls_of(StreamDataLoader(dataset())) == [2, 4, 5]
    assert pulls_of(StreamDataLoader(dataset(mark_ends=True))) == [3, 5, 5]
    assert pulls_of(StreamDataLoader(dataset(mark_ends=True, lengths=[5]))) == [2, 4, 5]
    assert pulls_of(StreamDataLoader(dataset(mark_ends=True), collate_fn=list)) == [2, 4, 5]


@dataclasses.dataclass
class Pair:
    one: object
    two: object


def kinds_of(scratch, index, position):
    """Items of each kind, in memory that all streams share."""
    scratch[:] = 100 * index + position
    as_tensor = torch.from_numpy(scratch)
    return {
        "array": scratch,
        "tensor": as_tensor,
        "dict": {"b": scratch, "a": as_tensor.view(4, 1, 2), "name": f"{index}/{position}"},
        "pair": Pair(scratch, (position, 1.5 * index)),
        "scalar": scratch[0, 0],
        "bits": as_tensor.view(torch.bfloat16),
        "bytes swapped": scratch.view(">i4"),
        "masked": {"n": np.ma.masked_equal(scratch.copy(), 0), "x": scratch},
    }


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("kind", kinds_of(np.zeros((4, 2), np.int32), 0, 0))
def test_streams_may_share_a_buffer(kind, windowed):
    scratch = np.zeros((4, 2), np.int32)

    def read(source):
        index, length = source
        for position in range(length):
            yield kinds_of(scratch, index, position)[kind]

    if windowed and kind == "scalar":
        return  # has no time axis
    sources = list(enumerate([3, 4, 1, 2, 6]))
    found, _ = with_marks(functools.partial(StreamDataset, sources, read, 2, time_steps=None if windowed else 2))
    assert sum(int(batch.is_last.sum()) for batch in found) == 5


class Writing:
    """Streams that write their items; after the first, they must not be iterated."""

    def __init__(self, length, dtype=torch.int32, broken=None):
        self.length, self.dtype, self.broken, self.position = length, dtype, broken, 0

    def __iter__(self):
        for position in range(self.length):
            assert position == 0, "iterated"
            self.position = 1
            yield {"x": torch.zeros(3, dtype=self.dtype), "y": 0}

    def read_into(self, out):
        if self.position == self.broken:
            self.broken = None  # it raises once
            raise OSError("unplugged")
        count = min(2, len(out["x"]), self.length - self.position)
        for i in range(count):
            out["x"][i] = self.position + i
            out["y"][i] = self.position + i
        self.position += count
        return count


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
@pytest.mark.parametrize("windows", ["aligned", "packed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_that_write_are_not_iterated(workers, windows, dtype):
    lengths, write = [7, 0, 12, 1, 5, 6, 2], functools.partial(Writing, dtype=dtype)
    build = functools.partial(StreamDataset, lengths, write, 3, time_steps=3, windows=windows)
    check_marks(with_marks(build, workers)[0], lengths)


# Errors


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_a_stream_that_writes_and_raised_once_is_not_read_on():
    write = functools.partial(Writing, broken=4)
    found, _ = with_marks(functools.partial(StreamDataset, [7, 3], write, 1, time_steps=2, on_error="skip"))
    assert marked(found) == [[1, 2]]


def breaking(text):
    """Its characters; `!` is where it breaks, `?` an item of another kind."""
    for character in text:
        if character == "!":
            raise OSError("unplugged")
        yield character if character == "?" else ord(character)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("texts", [["ab!", "cdefgh"], ["abcdef", "ab", "ab?"], ["abcdef", "!"], ["ab", "cd!f"]])
def test_an_error_comes_at_its_own_item(texts, workers):
    _, error = with_marks(functools.partial(StreamDataset, texts, breaking, 2, time_steps=2, seed=0), workers)
    assert isinstance(error, (ReadError, ItemError))


@pytest.mark.filterwarnings("ignore:skipped the rest")
@pytest.mark.parametrize("windows", ["aligned", "packed"])
@pytest.mark.parametrize("time_steps", [1, 2, 3, 4])
def test_a_stream_that_breaks_has_no_last_step(windows, time_steps):
    texts, asked = ["abc!", "de", "!", "fghi", "jkl?m", "n"], []

    def skip(error):
        asked.append((error.source_index, error.position))
        return "skip"

    options = {"time_steps": time_steps, "windows": windows, "on_error": skip, "lookahead": 0}
    found, _ = with_marks(functools.partial(StreamDataset, texts, breaking, 2, **options))
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :], "the policy is asked once, where the item is"
    assert sorted(marked(found)) == [[1, 1], [3, 3], [5, 0]]


@pytest.mark.filterwarnings("ignore:skipped the rest")
@pytest.mark.parametrize("time_steps", [1, 2, 3])
@pytest.mark.parametrize(("promised", "last"), [(2, [[0, 1]]), (4, [])])
def test_a_wrong_length_is_an_error_at_its_place(time_steps, promised, last):
    build = functools.partial(StreamDataset, [3, 5], range, 1, time_steps=time_steps, lengths=[promised, 5])
    assert isinstance(with_marks(build)[1], LengthError)
    found, _ = with_marks(functools.partial(build, on_error="skip"))
    assert sorted(marked(found)) == [*last, [1, 4]]


def test_a_stream_is_opened_again_where_it_broke_while_it_was_taken_ahead(monkeypatch):
    monkeypatch.setattr("stream_dataloader._reading.stream.time.sleep", lambda _: None)

    class Dropping:
        """Drops once at item 4; goes on by what it is given."""

        def __init__(self, way):
            self.way, self.opened = way, 0

        def __call__(self, length, start=0):
            self.opened += 1
            broken = 4 if self.opened == 1 else None
            if self.way == "writes" and start == 0:
                return Writing(length, broken=broken)
            return self.items(length, start, broken)

        def items(self, length, start, broken):
            for position in range(start, length):
                if position == broken:
                    raise OSError("dropped")
                yield {"x": torch.full((3,), position, dtype=torch.int32), "y": position}

    for way in ("iterates", "writes"):
        for length in (6, 4):
            dataset = StreamDataset([length], Dropping(way), 1, time_steps=2, retries=1, mark_ends=True)
            batches = list(StreamDataLoader(dataset))
            assert [y for batch in batches for y in batch.data["y"][:, 0].tolist()] == list(range(length))
            assert marked(batches) == [[0, length - 1]]


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_a_source_that_kills_its_worker_is_skipped_at_the_same_item():
    def read(n):
        for position in range(6):
            if n == 3 and position == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            yield n * 100 + position

    found = []
    for mark_ends in (True, False):
        dataset = StreamDataset(range(6), read, 4, time_steps=2, on_error="skip", mark_ends=mark_ends)
        loader = StreamDataLoader(dataset, 2, max_restarts=4)
        found.append(list(loader))
        (failure,) = loader.failures
        assert (failure.source_index, failure.position) == (3, 4)
    assert list(map(without_ends, found[0])) == list(map(batch_key, found[1]))
    assert sorted(marked(found[0])) == [[source, 5] for source in (0, 1, 2, 4, 5)]


# Resume


class OwnState:
    """An iterator that goes on by its own state, which is that of the item it yields next."""

    def __init__(self, length):
        self.length, self.position = length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return np.array([self.length, self.position - 1])

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def opens_anywhere(length, start=0):
    return (np.array([length, position]) for position in range(start, length))


@pytest.mark.filterwarnings("ignore:skipped the rest")
@pytest.mark.parametrize("kind", ["own state", "start", "forward", "windows", "known", "skipping", "early"])
def test_every_place_resumes_with_any_number_of_workers(kind):
    lengths, workers = [4, 0, 9, 2, 7, 1, 3, 6], (0, 2) if kind in ("own state", "windows") else (0,)

    def dataset():
        if kind == "windows":
            cuts = [(i, [2] * (n // 2) + [0] * (i % 2) + [n % 2]) for i, n in enumerate(lengths)]
            return StreamDataset(cuts, Windows(), 3, seed=0, shuffle=True, mark_ends=True)
        options = {"known": {"lengths": lengths}, "skipping": {"on_error": "skip"}}.get(kind, {})
        open_stream = {"own state": OwnState, "start": opens_anywhere}.get(kind, Counting())
        sources = lengths if kind in ("own state", "start") else list(enumerate(lengths))
        if kind == "skipping":
            sources, open_stream = ["abcd", "ab!", "abc!d", "!", "", "abcdefg", "ab"], breaking
        if kind == "early":
            options["open_early"] = True
        return StreamDataset(sources, open_stream, 3, time_steps=2, seed=0, shuffle=True, mark_ends=True, **options)

    check_resume(lambda workers: StreamDataLoader(dataset(), workers), num_workers=workers)


@pytest.mark.parametrize("open_stream", [OwnState, opens_anywhere])
def test_a_state_is_the_same_with_marks_and_without(open_stream):
    def loader(mark_ends):
        return StreamDataLoader(StreamDataset([5, 3, 4], open_stream, 2, time_steps=2, seed=0, mark_ends=mark_ends))

    found = [list(loader(mark_ends)) for mark_ends in (True, False)]
    for step, (batch, other) in enumerate(zip(*found, strict=True)):
        assert batch.state_dict() == other.state_dict()
        for mark_ends in (True, False):
            resumed = loader(mark_ends)
            resumed.load_state_dict((other if mark_ends else batch).state_dict())
            rest = found[0 if mark_ends else 1][step + 1 :]  # what was saved with the one loads with the other
            assert [batch_key(one) for one in resumed] == [batch_key(one) for one in rest]


class Stateless(OwnState):
    def state_dict(self):
        raise OSError("locked")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_had_is_an_error_of_the_same_batch(workers):
    batches, error = with_marks(functools.partial(StreamDataset, [5], Stateless, 1, time_steps=2), workers)
    assert not batches
    assert "item 2" in str(error)
    assert "the stream's state_dict raised OSError('locked')" in str(error)


# The field


def test_the_field_goes_wherever_a_batch_goes():
    batch = next(iter(StreamDataLoader(StreamDataset([2, 3], range, 2, time_steps=2, mark_ends=True))))
    assert batch.is_last.dtype == torch.bool
    assert batch.is_last.tolist() == [[False, False], [True, False]]
    for other in (
        batch.to(torch.bfloat16),
        batch.cpu(),
        batch.map(torch.clone),
        pickle.loads(pickle.dumps(batch)),
        copy.copy(batch),
        copy.deepcopy(batch),
        dataclasses.replace(batch, data=None),
    ):
        assert torch.equal(other.is_last, batch.is_last)
        assert other.is_last.dtype == torch.bool
    with pytest.raises(ValueError, match=r"is_last must be of mask's shape"):
        dataclasses.replace(batch, is_last=torch.zeros(3, dtype=torch.bool))
    batch.is_last[:] = True  # a user's own memory
    assert batch.to("meta").is_last.device.type == "meta"
