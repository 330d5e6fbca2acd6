"""`Anchors`: every n-th item of streams or groups, from a place that is drawn anew in each epoch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_dataloader._engine import options
from stream_dataloader._engine.schedule.anchors import AnchorCut, Spacing
from stream_dataloader._engine.schedule.rules import IntArray
from stream_dataloader._engine.schedule.sections import Cuts
from stream_dataloader.errors import shorten

__all__ = ["Anchors"]

_MOST = 2**31


class Anchors:
    """Every n-th item of a stream, for `anchors=` of `StreamDataset` and `LaneBatchSampler`.

    Made for policies that predict chunks of actions. The anchors of a source, or of a sampler's group, are a stream:
    `is_first` is set at the first one, and `is_last` at the last. `position` counts anchors, so that carried states
    notice if one is left out. Which item it is, the items themselves tell (`frame_index` of LeRobot), as does `of`.

    Args:
        every: Distance between anchors, 1 to 2**31.
        phase: The first anchor. None: drawn in each epoch from 0 to `every - 1`, by (seed, epoch, source), if
            there is `shuffle`; otherwise 0, so that validation has the same anchors in each epoch.
        first: Item 0 is an anchor, too.
        last: The last item that `ahead` allows is an anchor, too.
        ahead: Number of items that there must be from an anchor on, itself included, such as the actions of a chunk.
        lengths: Number of items of each source or group; None: those of the dataset or sampler.

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

    def of(self, source: int, *, epoch: int, seed: int) -> list[int]:
        """Return the anchors of a source or group, in order, for an epoch of a dataset or sampler that shuffles.

        Raises:
            ValueError: The lengths are those of the dataset or sampler, so they are not known here.
            IndexError: There is no such source.
        """
        if self.lengths is None:
            raise ValueError(f"{self!r} has the lengths of a dataset; pass lengths=")
        if not 0 <= source < len(self.lengths):
            raise IndexError(f"source {source} is out of range for {len(self.lengths)} sources")
        found: list[int] = Cuts([AnchorCut(self.lengths, self.spacing)], seed).items(source, epoch).tolist()
        return found

    @property
    def spacing(self) -> Spacing:
        """The options, for the schedule."""
        return Spacing(self.every, self.phase, self.first, self.last, self.ahead)

    def __repr__(self) -> str:
        return repr(self.spacing)


def check_anchors(given: Any, sections: object, time_steps: Any, shuffle: Any) -> Anchors | None:
    """Return the `anchors` of a dataset or sampler, with the phase that its `shuffle` sets."""
    if given is None:
        return None
    if sections is not None:
        raise ValueError("anchors= and sections= both say which items of a stream are read; leave one of them out")
    if time_steps is None:
        what = "anchors= counts time steps, and time_steps is None, so an item may be a whole window"
        raise ValueError(f"{what}; pass time_steps=, and streams that yield single time steps")
    anchors = given if isinstance(given, Anchors) else Anchors(options.integer("anchors, their distance,", given, 1))
    if options.flag("shuffle", shuffle) or anchors.phase is not None:
        return anchors
    found = copy.copy(anchors)
    found.phase = 0
    return found


def lengths_with(anchors: Anchors, lengths: Any, of: str = "sources") -> Any:
    """Return the lengths that were passed to anchors or to the dataset, and warn of those too short for any.

    Raises:
        ValueError: There are no lengths, or the two differ.
    """
    if lengths is None and anchors.lengths is None:
        raise ValueError(f"{anchors!r} needs the number of items of each source; pass lengths= to StreamDataset")
    own = anchors.lengths
    if lengths is not None and own is not None and not np.array_equal(own, lengths):
        raise ValueError(f"anchors= has {shorten(own.tolist())} as lengths, and the {of} have others")
    lengths = own if lengths is None else lengths
    if short := int((np.asarray(lengths) < anchors.ahead).sum()):
        what = f"{short} of {len(lengths)} {of} have fewer items than ahead={anchors.ahead}"
        warnings.warn(f"{what}, and so no anchor", stacklevel=5)
    return lengths
