"""Where a loader stands, as plain data: what `state_dict` gives and `load_state_dict` takes.

Guarantee: a state is keyed by lane and holds no word on workers, so that any number of them can take it up; one
of other sources or options is refused, with both sides named.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from stream_dataloader.errors import StateError
from stream_dataloader.mixing import Mix
from stream_dataloader.progress import After, LaneState, Snapshot
from stream_dataloader.rules import Rules
from stream_dataloader.structure import as_array

VERSION = 1


def to_plain(rules: Rules, epoch: int, snapshot: Snapshot | None, fingerprint: str, failures: int) -> dict[str, Any]:
    """A state as plain data; without a snapshot, that of an epoch that has not begun."""
    state: dict[str, Any] = {
        "version": VERSION,
        "seed": rules.seed,
        "groups": rules.groups.total,
        "first_group": rules.groups.first,
        "epoch": epoch,
        "failures": failures,
        **{name: getattr(rules, name) for name in _COMPARED},
        "fingerprint": fingerprint,
        **({} if rules.mix is None else {"mix": _plain_mix(rules.mix)}),
    }
    if snapshot is None:
        return {**state, "step": 0}
    return {
        **state,
        "step": snapshot.step,
        "cursors": list(snapshot.cursors),
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


def _plain_mix(mix: Mix) -> dict[str, Any]:
    return {
        field.name: list(value) if isinstance(value := getattr(mix, field.name), tuple) else value
        for field in fields(mix)
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


#: The same for a mix of several lists.
_COMPARED_IN_MIX = {
    "sizes": "the numbers of sources",
    "weights": "weights",
    "exhausted": "exhausted",
    "shuffles": "the datasets' shuffle",
    "schedules": "the datasets' schedule",
}


def from_plain(state: Any, rules: Rules, fingerprint: str) -> tuple[int, int, Snapshot | None, int]:
    """Seed, epoch, snapshot and number of failures of a state.

    Raises:
        StateError: It is no state, or one of another dataset; says how they differ.
    """
    try:
        return _from_plain(state, rules, fingerprint)
    except (KeyError, TypeError, IndexError) as error:
        raise StateError(f"the state is not whole: {error!r}; pass what state_dict() returned, all of it") from error


def _from_plain(state: Any, rules: Rules, fingerprint: str) -> tuple[int, int, Snapshot | None, int]:
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is no state of a StreamDataLoader, but a {type(state).__name__}; pass a state_dict()")
    if state["version"] != VERSION:
        raise StateError(f"the state is of version {state['version']}, and this library reads version {VERSION}")
    if (state["groups"], state["first_group"]) != (rules.groups.total, rules.groups.first):
        raise StateError(
            f"the state is of {state['groups']} groups, from number {state['first_group']} on, and the loader has "
            f"{rules.groups.total}, from number {rules.groups.first} on"
        )
    if ("mix" in state) != (rules.mix is not None):
        one, several = "one dataset", "several datasets that are interleaved (mix)"
        saved, here = (several, one) if rules.mix is None else (one, several)
        raise StateError(f"the state was saved with {saved}, and this is {here}; build it as it was")
    if rules.mix is not None:
        _compare(_COMPARED_IN_MIX, state["mix"], _plain_mix(rules.mix))
    _compare(_COMPARED, state, {name: getattr(rules, name) for name in _COMPARED})
    if state["fingerprint"] != fingerprint:
        raise StateError(
            f"the state was saved with other sources (fingerprint {state['fingerprint']}, here {fingerprint}); pass "
            "the same list, or, if only paths have moved, the same fingerprint= to both datasets"
        )
    if state["step"] == 0 and "lane_states" not in state:
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
    snapshot = Snapshot(state["step"], tuple(state["cursors"]), tuple(state["returned"]), lanes)
    return int(state["seed"]), int(state["epoch"]), snapshot, int(state["failures"])


def _compare(options: Mapping[str, str], saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for name, option in options.items():
        if saved[name] != here[name]:
            raise StateError(
                f"the state was saved with {option} {saved[name]!r}, and the dataset has {here[name]!r}; "
                "build it as it was, or start the epoch anew"
            )


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
    elif isinstance(value, torch.Tensor):
        update(f"{value.dtype}".encode())
        _hash(as_array(value), update)
    elif isinstance(value, (np.ndarray, np.generic)) and not np.asarray(value).dtype.hasobject:
        update(f"{value.dtype.str}{value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())
    else:
        try:
            update(pickle.dumps(pickle.loads(pickle.dumps(value, 5)), 5))  # read back: what is shared becomes equal
        except Exception:  # cloudpickle may do, with its own notion of equality
            update(type(value).__qualname__.encode())
