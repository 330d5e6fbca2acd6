"""Epochs of n batches, which are stretches of an endless run: a place in one, and how states and warnings say it.

Guarantee: a loader and a batch sampler say it alike, so that either goes on with the other's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stream_dataloader.errors import StateError


class StretchPlace(NamedTuple):
    """A place in an epoch of n batches, which is a stretch of an endless run.

    Attributes:
        number: The epoch's.
        delivered: How many of its batches were delivered.
    """

    number: int
    delivered: int

    def plain(self, length: int) -> dict[str, Any]:
        """What a state has of it, beside the place in the run.

        Args:
            length: Number of batches n of an epoch.
        """
        return {"stretch": {**self._asdict(), "batches_per_epoch": length}}


def stretch_of(state: Mapping[str, Any]) -> StretchPlace | None:
    """The place that a state has; None if it was saved without epochs of n batches.

    Raises:
        StateError: It is none.
    """
    if "stretch" not in state:
        return None
    place = StretchPlace(int(state["stretch"]["number"]), int(state["stretch"]["delivered"]))
    if min(place) < 0:
        raise StateError(f"the state's place in an epoch is {place._asdict()}, which cannot be negative")
    return place


def taken_up(saved: StretchPlace | None, length: int) -> StretchPlace:
    """The place to go on from, in epochs of `length` batches; those that were saved may have had more."""
    number, delivered = saved or (0, 0)
    return StretchPlace(number + 1, 0) if delivered >= length else StretchPlace(number, delivered)


def renamed(number: int, own: int, length: int, what: str) -> str:
    """What to tell who set another number than that of the epoch that comes.

    Args:
        number: The number that was set.
        own: That of the epoch that comes.
        length: Number of batches of an epoch.
        what: What reads the run, a loader for instance.
    """
    return (
        f"set_epoch({number}) was called, and epoch {own} comes next. An endless run has no other place for epoch "
        f"{number}: it goes on where it stands, and its next {length} batches are called epoch {number}. To go on "
        f"where another {what} stopped, load its state; set_epoch(0) begins anew"
    )
