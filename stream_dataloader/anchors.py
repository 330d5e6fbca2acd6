"""`Anchors`: every n-th item of groups, from a place that is drawn anew in each epoch."""

from __future__ import annotations

from collections.abc import Sequence

from stream_dataloader._engine import options
from stream_dataloader._engine.schedule.anchors import AnchorCuts, Spacing
from stream_dataloader._engine.schedule.rules import IntArray

__all__ = ["Anchors"]

_MOST = 2**31


class Anchors:
    """Every n-th item of a group, for `LaneBatchSampler(..., anchors=...)`: policies that predict chunks of actions.

    Each group's anchors are a stream: `is_first` is set at the first one, and `is_last` at the last. `position` counts
    anchors, so that carried states notice if one is left out. The item itself is known from the index that is drawn,
    and from the dataset's own items (`frame_index` of LeRobot).

    Args:
        every: Distance between anchors, 1 to 2**31.
        phase: The first anchor. None: drawn in each epoch from 0 to `every - 1`, by (seed, epoch, group), if the
            sampler shuffles; otherwise 0, so that validation has the same anchors in each epoch.
        first: Item 0 is an anchor, too.
        last: The last item that `ahead` allows is an anchor, too.
        ahead: Number of items that there must be from an anchor on, itself included, such as the actions of a chunk.
        lengths: Number of items of each group; None: those of the sampler.

    Raises:
        ValueError: A number is out of range.
        TypeError: An option is of the wrong type.

    Example:
        >>> from stream_dataloader import Anchors, LaneBatchSampler
        >>> sampler = LaneBatchSampler(1, 4, lengths=[11], anchors=Anchors(4, phase=2, first=True))
        >>> [[int(index) for index in batch] for batch in sampler]
        [[0, 2, 6, 10]]
        >>> Anchors(4, lengths=[11]).of(0, epoch=0, seed=1), Anchors(4, lengths=[11]).of(0, epoch=1, seed=1)
        ([2, 6, 10], [1, 5, 9])
    """

    def __init__(
        self,
        every: int,
        *,
        phase: int | None = None,
        first: bool = False,
        last: bool = False,
        ahead: int = 1,
        lengths: Sequence[int] | IntArray | None = None,
    ) -> None:
        self.every = options.integer("every", every, 1, _MOST)
        self.phase = None if phase is None else options.integer("phase", phase, 0, _MOST)
        self.first, self.last = options.flag("first", first), options.flag("last", last)
        self.ahead = options.integer("ahead", ahead, 1, _MOST)
        self.lengths = None if lengths is None else options.check_lengths(lengths, len(lengths))

    def of(self, group: int, *, epoch: int, seed: int) -> list[int]:
        """Return the anchors of a group, in order, for an epoch of a sampler with this seed that shuffles.

        Raises:
            ValueError: The lengths are the sampler's own, so they are not known here.
            IndexError: There is no such group.
        """
        if self.lengths is None:
            raise ValueError(f"{self!r} has the lengths of a sampler; pass lengths=")
        if not 0 <= group < len(self.lengths):
            raise IndexError(f"group {group} is out of range for {len(self.lengths)} groups")
        found: list[int] = cuts_of(self, self.lengths, seed, shuffle=True).items(group, epoch).tolist()
        return found

    def __repr__(self) -> str:
        given = [] if self.phase is None else [f"phase={self.phase}"]
        given += [f"{name}=True" for name in ("first", "last") if getattr(self, name)]
        given += [] if self.ahead == 1 else [f"ahead={self.ahead}"]
        return f"Anchors({', '.join([str(self.every), *given])})"


def cuts_of(anchors: Anchors, lengths: IntArray, seed: int, *, shuffle: bool) -> AnchorCuts:
    """Return the anchors of groups of these lengths."""
    phase = 0 if anchors.phase is None and not shuffle else anchors.phase
    spacing = Spacing(anchors.every, phase, anchors.first, anchors.last, anchors.ahead)
    return AnchorCuts(lengths, spacing, seed)
