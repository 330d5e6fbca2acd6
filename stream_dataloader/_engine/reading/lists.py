"""Lists of sources that a dataset reads, each with its `open_stream`. Most datasets have one list.

::

    sources        0 1 2 3 4 5 6 7 8      index of a source, over all lists
    list 0         a b c d                its factory opens 0 to 3
    list 1                 e f g h i      its factory opens 4 to 8, which are 0 to 4 in it

Guarantee: lists never change, so datasets share them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np

from stream_dataloader._engine import options
from stream_dataloader._engine.items.content import hash_content
from stream_dataloader._engine.memory.pickling import ByValue
from stream_dataloader._engine.reading.growth import GivenList
from stream_dataloader._engine.reading.opening import declares_early, takes_start
from stream_dataloader._engine.reading.sources import MadeSources, PackedSources, Sources, is_safe_anywhere, sources_of
from stream_dataloader._engine.schedule.anchors import AnchorCut
from stream_dataloader._engine.schedule.mix import Mix
from stream_dataloader._engine.schedule.rules import IntArray
from stream_dataloader._engine.schedule.sections import Cut, Cuts
from stream_dataloader.anchors import Anchors, lengths_with
from stream_dataloader.errors import shorten
from stream_dataloader.protocols import KnowsLengths, StreamFactory
from stream_dataloader.sectioning import Sections, cut_of, described, with_lengths
from stream_dataloader.stream_info import source_key

_LOOKED_AT = 1024  # sources that a fingerprint reads from a user's sequence, which makes them on request


@dataclass(frozen=True, eq=False)
class SourceList:
    """One list of sources with the user's options for it; see `StreamDataset`.

    Attributes:
        sources: The sources.
        open_stream: Opens the stream of one of them.
        lengths: `(sources,)`, number of items of each; None if they are not known.
        sections: The cut into sections; None if sources are read whole.
        anchors: The items that are read, if not all are.
        named: The fingerprint that was given, if any.
        given: The user's own list.
    """

    sources: Sequence[Any]
    open_stream: StreamFactory
    lengths: IntArray | None = None
    sections: Sections | None = None
    named: str | None = None
    given: GivenList = dataclasses.field(default_factory=GivenList)
    anchors: Anchors | None = None

    @classmethod
    def checked(
        cls,
        sources: Any,
        open_stream: Any,
        lengths: Any,
        sections: Sections | None,
        fingerprint: Any,
        anchors: Anchors | None = None,
    ) -> SourceList:
        """Check the options and create the list.

        Raises:
            ValueError: A value is out of range, or conflicts with another.
            TypeError: A value is of the wrong type, or a source cannot be pickled.
        """
        options.check_callable("open_stream", open_stream, "open_stream(source), which yields items")
        takes_start(open_stream)  # remembers the answer, so that forked workers need not inspect the function again
        packed = sources_of(options.check_sources(sources))
        if lengths is None and isinstance(open_stream, KnowsLengths):
            lengths = open_stream.lengths_of(sources)
        if sections is not None:
            sections = with_lengths(sections, lengths)
            lengths = sections.lengths
        if anchors is not None:
            lengths = lengths_with(anchors, lengths)
        lengths = options.check_lengths(lengths, len(packed))
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be a string, and is {fingerprint!r}, a {type(fingerprint).__name__}")
        return cls(packed, open_stream, lengths, sections, fingerprint, GivenList(sources), anchors)

    def longer(self, more: list[Any], lengths: Any) -> SourceList:
        """Return this list with more sources behind its own.

        Raises:
            ValueError: Their lengths are needed and not given, or given and not needed.
            TypeError: The sources are made by a rule, or one cannot be pickled.
        """
        if not isinstance(self.sources, PackedSources):
            of = type(self.sources.sequence if isinstance(self.sources, MadeSources) else self.sources).__name__
            raise TypeError(f"the dataset's sources are a {of}, which knows its own; build the dataset of a list")
        known = self.lengths
        if isinstance(self.open_stream, KnowsLengths) and lengths is None:
            lengths = self.open_stream.lengths_of(more)
        if (known is None) != (lengths is None):
            what = "lengths= is missing: the dataset knows those" if lengths is None else "the dataset has no lengths"
            raise ValueError(f"{what} of its {len(self.sources)} sources; give lengths to both or to neither")
        if known is not None:
            lengths = np.concatenate([known, options.check_lengths(lengths, len(more))])
        cut = self.sections and Sections(self.sections.max_steps, jitter=self.sections.jitter)
        every = [*self.sources, *more]
        longer = SourceList.checked(every, self.open_stream, lengths, cut, self.named, self.anchors)
        return replace(longer, given=GivenList())  # the user may add to his list what he extends the dataset by

    def beginning(self, count: int) -> SourceList:
        """Return a list of the first sources."""
        if count == len(self.sources):
            return self
        lengths = None if self.lengths is None else self.lengths[:count]
        return replace(self, sources=self.sources[:count], lengths=lengths)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint that distinguishes this list from others."""
        return _fingerprint_of(self.sources) if self.named is None else self.named

    def cut(self, first: int, key: int) -> Cut:
        """Return the list's cut into sections, given its first source's index, and its number in random draws."""
        if self.sections is not None and self.lengths is not None:
            return cut_of(self.sections, self.lengths, first, key)
        if self.anchors is not None and self.lengths is not None:
            return AnchorCut(self.lengths, self.anchors.spacing, first, key)
        lengths = np.full(len(self.sources), -1, np.int64) if self.lengths is None else self.lengths
        return Cut(lengths, None, jitter=False, first=first)


def _fingerprint_of(sources: Sequence[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    looked_at = sources
    # A user's sequence may make any number of sources, so only some of them are looked at.
    own = getattr(sources.sequence, "fingerprint", None) if isinstance(sources, MadeSources) else None
    if isinstance(own, str):
        looked_at = [len(sources), own]
    elif isinstance(sources, MadeSources) and len(sources) > _LOOKED_AT:
        looked_at = [len(sources), *(sources[i * len(sources) // _LOOKED_AT] for i in range(_LOOKED_AT)), sources[-1]]
    for source in looked_at:
        hash_content(source, digest.update)
    return digest.hexdigest()


class SourceLists(Sources):
    """Lists of sources, one behind the other, as a sequence of all their sources.

    Attributes:
        starts: The index of each list's first source.
        sources: All sources; the list itself, if there is only one.
    """

    def __init__(self, lists: Iterable[SourceList], mix: Mix | None = None) -> None:
        self.lists = tuple(lists)
        self.mix = mix
        self.starts = tuple(accumulate((len(one.sources) for one in self.lists[:-1]), initial=0))
        self._count = self.starts[-1] + len(self.lists[-1].sources)

    @property
    def sources(self) -> Sequence[Any]:
        """All sources, see the class."""
        return self.lists[0].sources if len(self.lists) == 1 else self

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(one.sources for one in self.lists)

    def _source(self, index: int) -> Any:
        number, within = self.locate(index)
        return self.lists[number].sources[within]

    @property
    def open_stream(self) -> StreamFactory:
        """The `open_stream` of the only list; a function that raises if there are several, each with its own."""
        return self.lists[0].open_stream if self.mix is None else _opens_by_index

    def of(self, index: int) -> SourceList:
        """Return the list that contains a source, by the source's index."""
        return self.lists[self.list_of(index)]

    def list_of(self, index: int) -> int:
        """Return the number of the list that contains a source, by the source's index."""
        return bisect_right(self.starts, index) - 1

    def key(self, index: int) -> int:
        """Return a source's number in random draws, see `source_key`."""
        return source_key(self.starts, index)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the list that contains a source, and the source's index in that list.

        Raises:
            IndexError: There is no such source.
        """
        index = operator.index(index)
        if not 0 <= index < len(self.sources):
            padding = " (-1 stands for padding)" if index == -1 else ""
            raise IndexError(f"source {index}{padding} is out of range for {len(self.sources)} sources")
        number = self.list_of(index)
        return number, index - self.starts[number]

    def check_given(self) -> None:
        """Refuse to read lists that the user changed.

        Raises:
            ValueError: One has other sources than when it was packed.
        """
        for one in self.lists:
            one.given.check()
        if (count := len(self.sources)) != self._count:  # of a sequence that makes them
            what = f"the sequence of sources had {self._count} when the dataset was built, and has {count}"
            raise ValueError(f"{what}; it must not change: build a new dataset, or give a list and use dataset.extend")

    def early(self) -> Callable[[int], bool] | None:
        """Return a function that says by index whether a background thread may open a source ahead of need.

        Return None if no source may be opened early.
        """
        allowed = [declares_early(one.open_stream) and is_safe_anywhere(one.sources) for one in self.lists]
        return (lambda index: allowed[bisect_right(self.starts, index) - 1]) if any(allowed) else None

    @cached_property
    def lengths(self) -> IntArray | None:
        """`(sources,)`, number of items of each source, -1 where it is unknown; None if all are."""
        if all(one.lengths is None for one in self.lists):
            return None
        if len(self.lists) == 1:
            return self.lists[0].lengths
        return np.concatenate(
            [np.full(len(one.sources), -1, np.int64) if one.lengths is None else one.lengths for one in self.lists]
        )

    @cached_property
    def knows_lengths(self) -> bool:
        """Whether the lengths of all sources are known."""
        return self.lengths is not None and not (self.lengths < 0).any()

    @cached_property
    def most_empty(self) -> int:
        """Upper bound of the number of sources, or sections, without an item. Lengths must be known.

        A source has at most one empty section.
        """
        assert self.lengths is not None
        return len(self.lengths) if self._cuts else int(np.count_nonzero(self.lengths == 0))

    @property
    def has_anchors(self) -> bool:
        """Whether only some items of sources are read, so a source may have none in some epochs."""
        return any(one.anchors is not None for one in self.lists)

    def beginning(self, counts: Iterable[int]) -> SourceLists:
        """Return the first sources of each list, given their numbers."""
        return SourceLists([one.beginning(count) for one, count in zip(self.lists, counts, strict=True)], self.mix)

    def cuts(self, seed: int) -> Cuts | None:
        """Return the sections of all lists; None if every source is read whole."""
        return Cuts(cuts, seed) if (cuts := self._cuts) else None

    @property
    def _cuts(self) -> list[Cut]:
        """The cut of each list; empty if every source is read whole."""
        if all(one.sections is None for one in self.lists) and not self.has_anchors:
            return []
        return [one.cut(first, self.key(first)) for one, first in zip(self.lists, self.starts, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint that distinguishes these lists from others."""
        if self.mix is None:
            return self.lists[0].fingerprint
        return ", ".join(f"datasets[{number}] {one.fingerprint}" for number, one in enumerate(self.lists))

    @cached_property
    def lengths_fingerprint(self) -> str | None:
        """Fingerprint of the lengths, which may decide which lane reads which source."""
        return None if self.lengths is None else hashlib.blake2b(self.lengths.tobytes(), digest_size=16).hexdigest()

    @cached_property
    def described_sections(self) -> str | None:
        """Description of the cut into sections, for saved states; None if sources are read whole."""
        return "; ".join(map(described, self._cuts)) or None

    def __reduce__(self) -> tuple[Any, ...]:
        factories = {id(one.open_stream): ByValue(one.open_stream, "open_stream") for one in self.lists}
        bare = [(replace(one, open_stream=_opens_by_index), factories[id(one.open_stream)]) for one in self.lists]
        return _unpickled, (bare, self.mix)  # a factory that several lists share stays one object after unpickling


def _opens_by_index(source: Any) -> Any:
    raise TypeError(
        f"an interleaved dataset has several open_stream functions, and the one for {shorten(source)} depends on the "
        "source's index; call factory_of(index)(source) of the interleaved dataset"
    )


def _unpickled(bare: Iterable[tuple[SourceList, ByValue]], mix: Mix | None) -> SourceLists:
    return SourceLists((replace(one, open_stream=factory.value) for one, factory in bare), mix)
