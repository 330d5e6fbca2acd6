"""Lists of sources that grow while they are read: `GivenList` notices changes, `ListReaders` are told of longer lists.

Guarantee: a list changes for its readers between two batches, in all of them at once, or not at all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from stream_dataloader.errors import shorten

_WATCHED = 1 << 16  # a copy of a longer list would take memory that packed sources do not


class GivenList:
    """The list that a user gave as `sources`, which must not change behind the dataset's back.

    A dataset keeps its own copy, so an appended source would never be read, and no error would say so.
    """

    def __init__(self, given: Any = ()) -> None:
        self._given: list[Any] = given if isinstance(given, list) and len(given) <= _WATCHED else []
        self._seen = tuple(self._given)

    def check(self) -> None:
        """Refuse a list that was changed.

        Raises:
            ValueError: It has other elements than it had.
        """
        given, seen = self._given, self._seen
        if len(given) == len(seen) and all(now is before for now, before in zip(given, seen, strict=True)):
            return
        if len(given) > len(seen):
            what = f"it had {len(seen)}, and has {len(given)}"
            remedy = f"dataset.extend({shorten(given[len(seen) :])}) adds sources to a dataset in use"
        else:
            index = next((i for i, source in enumerate(given) if source is not seen[i]), len(given))
            what = f"sources[{index}] was {shorten(seen[index])}"
            remedy = "leave the list as it is, and build a new dataset for other sources"
        raise ValueError(f"the list of sources was changed since the dataset was built: {what}; {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # another process has no list of the user's


class ListReader(Protocol):
    """An object that reads a dataset, and goes on when its list has become longer; both are `SourceLists`."""

    def _hold(self, before: Any, longer: Any) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Stand still; calling what the context gives goes on with the longer list.

        Raises:
            ValueError: The list cannot become longer where this one stands.
        """


class ListReaders:
    """All that read one dataset."""

    def __init__(self) -> None:
        # In the order in which they came, which is the same on all ranks: loaders may meet those of other ranks.
        self._all: weakref.WeakKeyDictionary[ListReader, None] = weakref.WeakKeyDictionary()

    def add(self, reader: ListReader) -> None:
        """Tell one from now on."""
        self._all[reader] = None

    @contextlib.contextmanager
    def hold(self, before: Any, longer: Any) -> Iterator[Callable[[], None]]:
        """Have all stand still; calling what the context gives lets them go on with a longer list."""
        with contextlib.ExitStack() as held:
            all_of_them = [held.enter_context(one._hold(before, longer)) for one in list(self._all)]

            def go_on() -> None:
                for each in all_of_them:
                    each()

            yield go_on

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def as_listed(sources: Sequence[Any] | Iterable[Any]) -> list[Any]:
    """Return the sources to add.

    Raises:
        TypeError: It is one text, or no iterable.
    """
    if isinstance(sources, (str, bytes)) or not isinstance(sources, Iterable):
        raise TypeError(f"extend takes a list of sources, and got {shorten(sources)}; pass [source] to add one")
    return list(sources)
