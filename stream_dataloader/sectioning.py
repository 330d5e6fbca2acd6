"""`sections`: sources cut into shorter streams, at places drawn anew in each epoch or at fixed ones.

Guarantee: within an epoch all promises hold with sections in place of sources, cut by (seed, epoch, source) alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_dataloader import _options as options
from stream_dataloader._schedule.rules import IntArray
from stream_dataloader._schedule.sections import Cut
from stream_dataloader.errors import shorten
from stream_dataloader.stream_info import cuts_key

__all__ = ["Sections", "sections"]

_MOST_STEPS = 2**31  # drawn out of 32 random bits


class Sections:
    """How sources are cut into sections: what `sections` returns, for `StreamDataset(..., sections=...)`.

    Attributes:
        lengths: `(num_sources,)` int64, number of items of each source; None: those of the dataset.
        steps: The most items of a section.
        jitter: Whether cuts are drawn anew in each epoch.
    """

    def __init__(self, lengths: Sequence[int] | IntArray | None, steps: int, *, jitter: bool = True) -> None:
        self.lengths = None if lengths is None else options.check_lengths(lengths, len(lengths))
        self.steps = options.integer("steps", steps, 1, _MOST_STEPS)
        self.jitter = options.flag("jitter", jitter)

    def of(self, source: int, *, epoch: int, seed: int) -> list[tuple[int, int]]:
        """The sections `[start, stop)` of one source, in order, as a dataset with that seed cuts it in that epoch.

        Args:
            source: Index of the source.
            epoch: Number of the epoch.
            seed: The dataset's `seed`.

        Raises:
            ValueError: The lengths are the dataset's own, so they are not known here.
            IndexError: There is no such source.
        """
        if self.lengths is None:
            raise ValueError("these sections have no lengths of their own; give sections(lengths, steps)")
        if not 0 <= source < len(self.lengths):
            raise IndexError(f"source {source} is out of range for {len(self.lengths)} sources")
        cut = Cut(self.lengths[source : source + 1], self.steps, jitter=self.jitter, first=source)
        places = np.arange(cut.counts[0])
        starts, stops = cut.bounds(np.zeros_like(places), places, cuts_key(seed, epoch))
        return [(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True) if start < stop]

    def resolve(self, lengths: Any) -> Any:
        """The lengths of the sources: these, or those that the dataset was given.

        Raises:
            ValueError: There are none, or they differ.
        """
        if self.lengths is None:
            if lengths is None:
                what = "sections(None, steps) takes the dataset's lengths, and it has none"
                raise ValueError(f"{what}; give sections(lengths, steps) the number of items of each source")
            return lengths
        if lengths is not None and not np.array_equal(np.asarray(lengths), self.lengths):
            own = shorten(self.lengths.tolist())
            raise ValueError(
                f"lengths= is {shorten(lengths)}, and sections= has {own}; give lengths to one of them only"
            )
        return self.lengths

    def __repr__(self) -> str:
        sources = "the dataset's" if self.lengths is None else f"{len(self.lengths)} sources"
        return f"sections({sources}, steps={self.steps}, jitter={self.jitter})"


def sections(lengths: Sequence[int] | IntArray | None, steps: int, *, jitter: bool = True) -> Sections:
    """Cut sources into sections of at most `steps` items, for `StreamDataset(..., sections=...)`.

    Each section is a stream of its own: `reset` and `is_start` are set at its first item, and shuffle and schedule deal
    out sections. `batch.source` stays the index in the dataset's `sources`, and `batch.position` the number of the item
    within the whole source. So (source, position) names the same item in each epoch, wherever it was cut.

    A section is opened at its first item by the factory's parameter `start` or the iterator's `seek_item`. A stream
    that offers neither is read from its beginning for each of its sections.

    Args:
        lengths: Number of items of each source. None: the `lengths` of the dataset.
        steps: The most items of a section, 1 to 2**31. With a multiple of `time_steps`, fixed cuts and aligned windows,
            only sources' last windows are padded.
        jitter: True: in each epoch a source's first section has 1 to `steps` items, drawn from (seed, epoch, source);
            the others follow, of `steps` items but for the last. False: all have `steps` items but for the last, in
            every epoch.

    Raises:
        ValueError: `steps` is out of range, or a length is negative.
        TypeError: `steps` is no integer.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset, sections
        >>> def open_numbers(source, start=0):
        ...     yield from range(source + start, source + 10)
        >>> dataset = StreamDataset([100], open_numbers, 2, time_steps=4, sections=sections([10], 4), seed=4)
        >>> for batch in StreamDataLoader(dataset):
        ...     print(batch.position.T.tolist(), batch.reset.tolist())
        [[0, 1, -1, -1], [2, 3, 4, 5]] [True, True]
        [[6, 7, 8, 9], [-1, -1, -1, -1]] [True, False]
        >>> dataset.sections.of(0, epoch=0, seed=4), dataset.sections.of(0, epoch=2, seed=4)
        ([(0, 2), (2, 6), (6, 10)], [(0, 4), (4, 8), (8, 10)])
    """
    return Sections(lengths, steps, jitter=jitter)


def check_sections(given: Any, time_steps: Any) -> Sections | None:
    """The `sections` of a dataset."""
    if given is None:
        return None
    if not isinstance(given, Sections):
        found = f"{shorten(given)}, a {type(given).__name__}"
        raise TypeError(f"sections must be what sections(lengths, steps) returns, and is {found}")
    if time_steps is None:
        what = "sections= counts time steps, of which windows may have any number"
        raise ValueError(f"{what}; pass time_steps=, and streams that yield single time steps")
    return given


def described(cut: Cut) -> str:
    """How a list is cut, as saved states have it."""
    lengths = hashlib.blake2b(cut.lengths.tobytes(), digest_size=16).hexdigest()
    return f"steps={cut.steps}, jitter={cut.jitter}, lengths={lengths}"
