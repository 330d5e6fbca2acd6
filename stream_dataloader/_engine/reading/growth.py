"""Lists of sources that grow while they are read: `GivenList` notices changes, `ListReaders` are told of longer lists.

Guarantee: a list changes for its readers between two batches, in all of them at once, or not at all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
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
    """An object that reads a dataset, and goes on when its list has become longer."""

    def _hold(self) -> contextlib.AbstractContextManager[Callable[[Any], None]]:
        """Stand still; calling what the context gives with the longer list goes on.

        Raises:
            ValueError: The list cannot become longer where this one stands.
        """


class ListReaders:
    """All that read one dataset."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[ListReader] = weakref.WeakSet()

    def add(self, reader: ListReader) -> None:
        """Tell one from now on."""
        self._all.add(reader)

    def while_held(self, change: Callable[[], None], lists: Any) -> None:
        """Make a change while all stand still, and let them go on with longer lists."""
        with contextlib.ExitStack() as held:
            go_on = [held.enter_context(one._hold()) for one in list(self._all)]
            change()
            for each in go_on:
                each(lists)

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
