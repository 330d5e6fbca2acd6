"""`Sections`: sources cut into shorter streams, at fixed places or at places drawn anew in each epoch.

Guarantee: within an epoch all promises hold with sections in place of sources. Cuts depend on (seed, epoch, source)
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_dataloader._engine import options
from stream_dataloader._engine.schedule.anchors import AnchorCut
from stream_dataloader._engine.schedule.rules import IntArray
from stream_dataloader._engine.schedule.sections import Cut
from stream_dataloader.errors import shorten
from stream_dataloader.stream_info import cuts_key

__all__ = ["Sections"]

_MOST_STEPS = 2**31  # drawn out of 32 random bits


class Sections:
    """Cut of sources into sections of at most `max_steps` items, for `StreamDataset(..., sections=...)`.

    Each section is a stream of its own: `reset` and `is_first` are set at its first item, and shuffle and schedule
    apply to sections. `batch.source_index` stays the index in the dataset's `sources`, and `batch.position` the number
    of the item within the whole source. So (source, position) identifies the same item in each epoch, regardless of
    the cuts.

    A section is opened at its first item by the factory's parameter `start` or the iterator's `seek_item`. A stream
    with neither is read from its beginning for each of its sections.

    Args:
        max_steps: The most items of a section, 1 to 2**31. With a multiple of `time_steps`, fixed cuts and aligned
            windows, only sources' last windows are padded.
        jitter: True: in each epoch a source's first section has 1 to `max_steps` items, drawn from (seed, epoch,
            source); the others have `max_steps` items, except the last. False: all have `max_steps` items, except the
            last, in every epoch. None: the dataset's `shuffle`, so that validation has the same cuts in each epoch.
        lengths: Number of items of each source. None: the `lengths` of the dataset.

    Attributes:
        max_steps: As given.
        jitter: As given. In a dataset's `sections` it is True or False.
        lengths: `(num_sources,)` int64. In a dataset's `sections` they are known.

    Raises:
        ValueError: `max_steps` is out of range, or a length is negative.
        TypeError: `max_steps` is not an integer, or `jitter` is not True, False or None.

    Example:
        >>> from stream_dataloader import Sections, StreamDataLoader, StreamDataset
        >>> def open_numbers(source, start=0):
        ...     yield from range(source + start, source + 10)
        >>> cut = Sections(4, jitter=True)
        >>> dataset = StreamDataset([100], open_numbers, 2, time_steps=4, lengths=[10], sections=cut, seed=4)
        >>> for batch in StreamDataLoader(dataset):
        ...     print(batch.position.T.tolist(), batch.reset.tolist())
        [[0, 1, -1, -1], [2, 3, 4, 5]] [True, True]
        [[6, 7, 8, 9], [-1, -1, -1, -1]] [True, False]
        >>> dataset.sections.of(0, epoch=0, seed=4), dataset.sections.of(0, epoch=2, seed=4)
        ([(0, 2), (2, 6), (6, 10)], [(0, 4), (4, 8), (8, 10)])
    """

    def __init__(
        self, max_steps: int, *, jitter: bool | None = None, lengths: Sequence[int] | IntArray | None = None
    ) -> None:
        self.max_steps = options.integer("max_steps", max_steps, 1, _MOST_STEPS)
        self.jitter = None if jitter is None else options.flag("jitter", jitter)
        self.lengths = None if lengths is None else options.check_lengths(lengths, len(lengths))

    def of(self, source: int, *, epoch: int, seed: int) -> list[tuple[int, int]]:
        """Return the sections `[start, stop)` of one source, in order, for an epoch of a dataset with this seed.

        Args:
            source: Index of the source.
            epoch: Number of the epoch.
            seed: The dataset's `seed`.

        Raises:
            ValueError: The lengths or the jitter are the dataset's own, so they are not known here.
            IndexError: There is no such source.
        """
        if self.lengths is None or self.jitter is None:
            missing = "lengths" if self.lengths is None else "jitter"
            raise ValueError(f"{self!r} has the {missing} of a dataset; pass {missing}=, or use dataset.sections")
        if not 0 <= source < len(self.lengths):
            raise IndexError(f"source {source} is out of range for {len(self.lengths)} sources")
        cut = Cut(self.lengths[source : source + 1], self.max_steps, jitter=self.jitter, first=source)
        places = np.arange(cut.counts[0])
        starts, stops = cut.bounds(np.zeros_like(places), places, cuts_key(seed, epoch))
        return [(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True) if start < stop]

    def __repr__(self) -> str:
        given = [] if self.jitter is None else [f"jitter={self.jitter}"]
        if self.lengths is not None:
            given.append(f"lengths of {len(self.lengths)} sources")
        return f"Sections({', '.join([str(self.max_steps), *given])})"


def check_sections(given: Any, time_steps: Any, shuffle: Any) -> Sections | None:
    """Return the `sections` of a dataset, with the jitter that its `shuffle` sets."""
    if given is None:
        return None
    if isinstance(given, Sections):
        cut = given
    else:
        cut = Sections(options.integer("sections, the most items of one,", given, 1, _MOST_STEPS))
    if time_steps is None:
        what = "sections= counts time steps, and time_steps is None, so an item may be a whole window"
        raise ValueError(f"{what}; pass time_steps=, and streams that yield single time steps")
    if cut.jitter is not None:
        return cut
    return Sections(cut.max_steps, jitter=options.flag("shuffle", shuffle), lengths=cut.lengths)


def with_lengths(sections: Sections, lengths: Any) -> Sections:
    """Return sections with the lengths that were passed to them or to the dataset.

    Raises:
        ValueError: There are no lengths, or the two differ.
    """
    if sections.lengths is None:
        if lengths is None:
            what = f"{sections!r} takes the dataset's lengths, and it has none"
            raise ValueError(f"{what}; pass lengths= to StreamDataset, the number of items of each source")
        return Sections(sections.max_steps, jitter=sections.jitter, lengths=lengths)
    if lengths is not None and not np.array_equal(np.asarray(lengths), sections.lengths):
        own = shorten(sections.lengths.tolist())
        raise ValueError(f"lengths= is {shorten(lengths)}, and sections= has {own}; pass lengths to one of them only")
    return sections


def cut_of(sections: Sections, lengths: IntArray, first: int = 0, key: int | None = None) -> Cut:
    """Return how a list of these lengths is cut; `first` is the index of its first source, `key` its number in draws.

    The lengths may be the first ones of `sections.lengths`: a list has grown since.
    """
    assert sections.jitter is not None
    return Cut(lengths, sections.max_steps, jitter=sections.jitter, first=first, key=key)


def described(cut: Cut) -> str:
    """Describe the cut of a list, for saved states."""
    if isinstance(cut, AnchorCut):
        return repr(cut.spacing)
    lengths = hashlib.blake2b(cut.lengths.tobytes(), digest_size=16).hexdigest()
    return f"max_steps={cut.steps}, jitter={cut.jitter}, lengths={lengths}"
