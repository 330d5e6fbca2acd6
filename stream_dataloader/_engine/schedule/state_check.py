"""Checks of a saved state's numbers before they are used.

A state is input: it may be damaged, mixed up from two files, or edited. One wrong number can make an epoch leave
sources out without an error, so each group carries a checksum of everything that decides what is read. Numbers that
match their checksum must still be in range, because an edited state can come with a recomputed checksum.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stream_dataloader.errors import StateError, shorten

#: Numbers of a state fit into 64 bits, with room to add to them.
_MOST = 2**62

#: More groups than any number of ranks can share.
MOST_GROUPS = 1 << 20

#: Entries of a state that the checksum covers, besides the group and the mix. The place in an epoch of n batches is not
#: among them, as it does not decide what is read.
SHARED = (
    *("version", "seed", "groups", "epoch", "step", "time_steps", "windows", "padding_mode", "lookahead", "shuffle"),
    *("schedule", "deterministic", "num_sources", "lanes_of_a_group", "fingerprint", "lengths", "sections", "growth"),
)

#: A group's tuple: failures, draws given, draws to be given again, lanes, the layout of items, checksum.
_PLACE, _CHECKSUM = 4, 5


def number(name: str, value: Any, least: int = 0, most: int = _MOST) -> int:
    """Return a number of a state after checking it.

    Raises:
        StateError: It is no whole number, or not within `[least, most]`.
    """
    if type(value) is not int or not least <= value <= most:
        raise StateError(f"the state's {name} is {shorten(value)}, and must be a whole number from {least} to {most}")
    return value


def is_same(saved: Any, here: Any) -> bool:
    """Return whether a saved value equals one here, and is of its type: True equals 1, and is an int to isinstance."""
    return type(saved) is type(here) and bool(saved == here)


def checksum(state: Mapping[str, Any], group: Sequence[Any]) -> int:
    """Compute the CRC-32 of the entries that groups share and of one group's place, without the streams' own states."""
    skipped, given, again, lanes = group[:_PLACE]
    numbers = [given, len(again)]
    for draw in again:
        numbers += _numbers_of(draw)
    numbers += [skipped] if type(skipped) is int else [len(skipped), *skipped]
    for lane in lanes:
        numbers += _numbers_of(lane)
    mix = state.get("mix")
    shared = repr(([state.get(name) for name in SHARED], mix and sorted(mix.items())))
    return zlib.crc32(array("q", numbers), zlib.crc32(shared.encode("utf-8", "surrogateescape")))


def _numbers_of(saved: Any) -> Sequence[int]:
    """Return a draw's number; of a lane, or of a stream that waits for one, its place and the draws it reserves."""
    if type(saved) is int:
        return (saved,)
    reserved = saved["reserved"]
    if reserved is None:
        return saved["draw"], *saved["after"], -1
    if not reserved or type(reserved[0]) is int:
        return saved["draw"], *saved["after"], len(reserved), *reserved
    return saved["draw"], *saved["after"], len(reserved), *(one for draw in reserved for one in _numbers_of(draw))


def check_shared(state: Mapping[str, Any]) -> None:
    """Refuse impossible values of the numbers that all groups share."""
    number("seed", state["seed"], 0, 2**64)
    for name in ("epoch", "step", "num_sources"):
        number(name, state[name])
    number("lanes_of_a_group", state["lanes_of_a_group"], 1)
    if state["time_steps"] is not None:
        number("time_steps", state["time_steps"], 1)
    for pass_index, sources in state.get("growth", ()):
        number("pass in which the list grew", pass_index)
        number("list before it grew", sources, 0, state["num_sources"])


def check_group(state: Mapping[str, Any], name: str, most_given: int = _MOST) -> None:
    """Refuse a group whose numbers are impossible, or not those that were saved.

    Args:
        name: The group's key.
        most_given: The most draws that the group can have been given.
    """
    group = state[name]
    if isinstance(group[0], int):
        number(f"{name}, skipped sources,", group[0], 0, state["num_sources"])
    else:
        for skipped in group[0]:
            number(f"{name}, a skipped source,", skipped, -_MOST)
    # A state of an epoch's beginning has no places. Then there is no checksum, either.
    if len(group) == 1 and not state["step"]:
        return
    if len(group) != _CHECKSUM + 1:
        raise StateError(f"the state's {name} has {len(group)} entries, and must have {_CHECKSUM + 1}; it is not whole")
    _, given, again, lanes = group[:_PLACE]
    number(f"{name}, sources handed out,", given, 0, most_given)
    if len(lanes) != state["lanes_of_a_group"]:
        raise StateError(f"the state's {name} has {len(lanes)} lanes, and must have {state['lanes_of_a_group']}")
    held = [draw for one in again for draw in _draws_of(one, name)]
    for lane in lanes:
        held += [*_draws_of(lane, name), *(draw for one in lane["reserved"] or () for draw in _draws_of(one, name))]
    total, own = state["groups"], int(name.removeprefix("group_"))
    # A damaged number could be another valid one, so it is compared with what this group was given.
    for draw in held:
        if draw % total != own or draw // total >= given:
            raise StateError(f"the state's {name} holds source number {draw}, and {given} sources were handed out")
    # A source that two lanes hold would be read twice.
    if len(set(held)) < len(held):
        raise StateError(f"the state's {name} has the same source in two places")
    if group[_CHECKSUM] != checksum(state, group):
        raise StateError(
            f"the numbers of the state's {name} do not match their checksum: the state is damaged, or was put together "
            "from two states; load another one"
        )


def _draws_of(saved: Any, name: str) -> Iterator[int]:
    """Yield the draw of a lane, or of a stream that waits for one, if it has any; check its numbers.

    Reservations of a waiting stream's lane are among the draws to be given again, so they are not yielded here.
    """
    if not isinstance(saved, Mapping):
        if number(f"{name}, a source's number,", saved, -1) >= 0:
            yield saved
        return
    yield from _draws_of(saved["draw"], name)
    is_open, *counts, draws, idle = saved["after"]
    number(f"{name}, whether a stream is open,", is_open, 0, 1)
    number(f"{name}, whether a lane is idle,", idle, 0, 1)
    number(f"{name}, sources without an item,", draws, -_MOST)
    for count in counts:
        number(f"{name}, items that were read,", count)
    if len(counts) != 3 or bool(is_open) != (saved["draw"] >= 0):
        raise StateError(f"the state's {name} has a lane of source {saved['draw']} that says {shorten(saved['after'])}")
