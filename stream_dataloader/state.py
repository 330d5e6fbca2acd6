"""Where an epoch stands between two batches, as plain data: what `state_dict` gives and `load_state_dict` takes.

Workers run ahead of what was delivered, so their state is not the state. Each part tells which sources its
lanes took in the step and how far they have read; `Progress` follows, part by part as they are delivered, by the
same pure rules (`schedule.Rules`) that the workers' ledger follows. Between two steps every ticket is decided,
so little is left to be kept: a cursor, and for each lane what it reads and has reserved.

Guarantee: a state is keyed by lane and holds no word on workers; any number of them can take it up.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from stream_dataloader.errors import StateError
from stream_dataloader.schedule import NONE, Rules

VERSION = 1
_KEPT_RECORDS = 64  # trainers fetch ahead: the state can be had as of so many batches ago


class After(NamedTuple):
    """What a lane tells of itself after a step: how far its stream is read, in items and in time steps."""

    open: int
    items: int
    position: int
    first_window: int
    draws_without_item: int
    idle: int


#: Before the first step.
AT_START = After(0, 0, 0, 0, 0, 0)


def pack_after(lanes: Iterable[After]) -> bytes:
    """What some lanes tell, for a message."""
    return array("q", [number for lane in lanes for number in lane]).tobytes()


class LaneState(NamedTuple):
    """Where a lane stands between two steps.

    Attributes:
        grant: Number of its open stream's grant; `NONE` if there is none.
        after: What it told after the step.
        reserved: Grants of its reservations, `NONE` for one that was refused; None if it reserves no more.
        stream: What the stream's own `state_dict` returned, if it has one.
    """

    grant: int
    after: After
    reserved: tuple[int, ...] | None
    stream: Any = None


class Snapshot(NamedTuple):
    """Where an epoch stands between two steps.

    Attributes:
        step: The step that comes next.
        cursor: Grants given so far.
        returned: Grants among them that were not delivered, and are to be given again first.
        lanes: One state a lane.
    """

    step: int
    cursor: int
    returned: tuple[int, ...]
    lanes: tuple[LaneState, ...]


class Record(NamedTuple):
    """A `Snapshot`, unread: what costs nothing to keep at each step."""

    step: int
    cursor: int
    returned: tuple[int, ...]
    grants: tuple[int, ...]
    reserved: tuple[tuple[int, ...] | None, ...]
    after: tuple[bytes, ...]
    streams: Mapping[int, Any]


class Told(NamedTuple):
    """What a part tells for this.

    Attributes:
        taken: The sources its lanes took, in order: lane and grant.
        after: What each of its lanes tells, see `pack_after`.
        streams: States of the streams that have some, by lane.
    """

    taken: tuple[tuple[int, int], ...]
    after: bytes
    streams: Mapping[int, Any]


class Progress:
    """Follows an epoch as it is delivered.

    Args:
        rules: Those of the dataset.
        epoch: The epoch's number.
        start: Where it begins; None at its beginning.
        parts: How many parts a step has.

    Attributes:
        finished: The epoch's end was seen.
    """

    def __init__(self, rules: Rules, epoch: int, start: Snapshot | None, parts: int) -> None:
        self._rules, self.epoch, self.finished = rules, epoch, False
        start = start or beginning(rules)
        self._step, self._cursor = start.step, start.cursor
        self._missing = dict.fromkeys(start.returned)
        self._grants = tuple(lane.grant for lane in start.lanes)
        self._reserved = tuple(lane.reserved for lane in start.lanes)
        self._streams = {i: lane.stream for i, lane in enumerate(start.lanes) if lane.stream is not None}
        whole = pack_after(lane.after for lane in start.lanes)
        self._after: list[bytes] = [whole, *[b""] * (parts - 1)]
        self._records: deque[Record] = deque(maxlen=_KEPT_RECORDS)
        self._keep()

    def _keep(self) -> None:
        record = Record(
            self._step,
            self._cursor,
            tuple(self._missing),
            self._grants,
            self._reserved,
            tuple(self._after),
            self._streams,
        )
        self._records.append(record)

    def advance(self, told: Sequence[Told | None]) -> None:
        """Follow one more step.

        Args:
            told: What each part tells; None for a worker that ended before.
        """
        self._step += 1
        for i, part in enumerate(told):
            if part is None:
                continue
            self._after[i] = part.after
            if part.taken:
                self._take(part.taken)
            if part.streams or self._streams:
                self._streams = {**self._streams, **part.streams}
        self._keep()

    def _take(self, taken: Iterable[tuple[int, int]]) -> None:
        grants = list(self._grants)
        for lane, grant in taken:
            if self._rules.deterministic:
                expected = self._replay(lane)
                assert grant == expected, f"lane {lane} took grant {grant}, and {expected} was its turn"
            else:
                self._note(grant)
            grants[lane] = grant
        self._grants = tuple(grants)

    def _replay(self, lane: int) -> int:
        """What a lane that takes its next source gets."""
        held = self._reserved[lane]
        if held is None:
            return self._draw(ahead=False)
        missing = 1 if held else self._rules.lookahead + 1
        first, *others = (*held, *[self._draw(ahead=True) for _ in range(missing)])
        rest = None if first == NONE else tuple(others)
        self._reserved = (*self._reserved[:lane], rest, *self._reserved[lane + 1 :])
        return self._draw(ahead=False) if first == NONE else first

    def _draw(self, *, ahead: bool) -> int:
        decision = self._rules.decide(self._cursor, ahead)
        self._cursor += decision != NONE
        return decision

    def _note(self, grant: int) -> None:
        """A source was taken, in whatever order; those before it that were not are still to come."""
        if grant >= self._cursor:
            self._missing.update(dict.fromkeys(range(self._cursor, grant)))
            self._cursor = grant + 1
        else:
            self._missing.pop(grant, None)

    @property
    def step(self) -> int:
        """Number of steps delivered."""
        return self._step

    def record(self, step: int | None = None) -> Record:
        """Where the epoch stands, or stood before `step`; for `read`.

        Raises:
            ValueError: That is too long ago, or was not delivered yet.
        """
        record: Record
        for record in reversed(self._records):
            if step in (None, record.step):
                return record
        raise ValueError(
            f"the state as of step {step} is not known: steps {self._records[0].step} to {self._step} are; save it "
            "sooner, or ask the batch for it"
        )


def read(record: Record, rules: Rules) -> Snapshot:
    """What a record says."""
    # the first part's bytes cover all lanes until the parts of the first step have come
    numbers = array("q", b"".join(record.after))
    width = len(AT_START)
    lanes = []
    for lane in range(rules.lanes):
        after = After(*numbers[lane * width : (lane + 1) * width])
        grant = record.grants[lane] if after.open else NONE
        reserved = record.reserved[lane] if rules.deterministic or after.idle else beginning(rules).lanes[0].reserved
        lanes.append(LaneState(grant, after, reserved, record.streams.get(lane) if after.open else None))
    return Snapshot(record.step, record.cursor, record.returned, tuple(lanes))


def beginning(rules: Rules) -> Snapshot:
    """Before the first step."""
    lane = LaneState(NONE, AT_START, () if rules.lookahead else None)
    return Snapshot(0, 0, (), (lane,) * rules.lanes)


def to_plain(rules: Rules, epoch: int, snapshot: Snapshot | None, fingerprint: str, failures: int) -> dict[str, Any]:
    """A state as plain data; without a snapshot, that of an epoch that has not begun."""
    state: dict[str, Any] = {
        "version": VERSION,
        "seed": rules.seed,
        "groups": 1,
        "epoch": epoch,
        "failures": failures,
        **{name: getattr(rules, name) for name in _COMPARED},
        "fingerprint": fingerprint,
    }
    if snapshot is None:
        return {**state, "step": 0}
    return {
        **state,
        "step": snapshot.step,
        "cursor": snapshot.cursor,
        "returned": list(snapshot.returned),
        "lane_states": [
            {
                "grant": lane.grant,
                "after": list(lane.after),
                "reserved": None if lane.reserved is None else list(lane.reserved),
                **({} if lane.stream is None else {"stream": lane.stream}),
            }
            for lane in snapshot.lanes
        ],
    }


#: What a state and the dataset it is loaded for must agree on, and the option to change.
_COMPARED = {
    "lanes": "batch_size",
    "time_steps": "time_steps",
    "windows": "windows",
    "padding_mode": "padding_mode",
    "lookahead": "lookahead",
    "shuffle": "shuffle",
    "schedule": "schedule",
    "deterministic": "deterministic",
    "num_sources": "the number of sources",
}


def from_plain(state: Any, rules: Rules, fingerprint: str) -> tuple[int, int, Snapshot | None, int]:
    """Seed, epoch, snapshot and number of failures of a state.

    Raises:
        StateError: It is no state, or one of another dataset; says how they differ.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is no state of a StreamDataLoader, but a {type(state).__name__}; pass a state_dict()")
    if state["version"] != VERSION:
        raise StateError(f"the state is of version {state['version']}, and this library reads version {VERSION}")
    if state["groups"] != 1:
        raise StateError(f"the state is of {state['groups']} groups, and the loader has 1")
    for name, option in _COMPARED.items():
        if state[name] != getattr(rules, name):
            raise StateError(
                f"the state was saved with {option} {state[name]!r}, and the dataset has {getattr(rules, name)!r}; "
                "build it as it was, or start the epoch anew"
            )
    if state["fingerprint"] != fingerprint:
        raise StateError(
            f"the state was saved with other sources (fingerprint {state['fingerprint']}, here {fingerprint}); pass "
            "the same list, or, if only paths have moved, the same fingerprint= to both datasets"
        )
    if "lane_states" not in state:
        return int(state["seed"]), int(state["epoch"]), None, int(state["failures"])
    lanes = tuple(
        LaneState(
            lane["grant"],
            After(*lane["after"]),
            None if lane["reserved"] is None else tuple(lane["reserved"]),
            lane.get("stream"),
        )
        for lane in state["lane_states"]
    )
    snapshot = Snapshot(state["step"], state["cursor"], tuple(state["returned"]), lanes)
    return int(state["seed"]), int(state["epoch"]), snapshot, int(state["failures"])


def fingerprint_of(sources: Iterable[Any]) -> str:
    """A hash of a list of sources that does not depend on process, machine or Python version.

    Plain values, containers of them, paths, arrays, tensors and dataclasses count by content, other objects by
    their pickles, which may differ between versions.
    """
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        _hash(source, digest.update)
    return digest.hexdigest()


def _hash(value: Any, update: Any) -> None:
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex, PurePath)):
        text = repr(value.as_posix() if isinstance(value, PurePath) else value)
        update(f"{text}\0".encode("utf-8", "backslashreplace"))
    elif isinstance(value, Mapping):
        update(b"{")
        for key in sorted(value, key=repr):
            _hash(key, update)
            _hash(value[key], update)
        update(b"}")
    elif isinstance(value, (list, tuple)):
        update(b"[")
        for element in value:
            _hash(element, update)
        update(b"]")
    elif is_dataclass(value) and not isinstance(value, type):
        update(type(value).__qualname__.encode())
        for field in fields(value):
            _hash(getattr(value, field.name), update)
    elif isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:
        _hash(value.detach().cpu().numpy(), update)
    elif isinstance(value, (np.ndarray, np.generic)) and not np.asarray(value).dtype.hasobject:
        update(f"{value.dtype.str}{value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())
    else:
        try:
            update(pickle.dumps(pickle.loads(pickle.dumps(value, 5)), 5))  # read back: what is shared becomes equal
        except Exception:  # cloudpickle may do, with its own notion of equality
            update(type(value).__qualname__.encode())
