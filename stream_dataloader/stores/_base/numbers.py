"""The list of a store's sources: numbers.

Guarantee: the list costs nothing, however many streams there are, and its fingerprint is that of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, overload

__all__ = ["StreamNumbers"]


class StreamNumbers(Sequence[int]):
    """The numbers of a store's streams: 0, 1, 2, ...

    Args:
        count: How many streams there are.
        fingerprint: What the store holds, in short; saved states compare it.
    """

    open_early: ClassVar[bool] = True

    def __init__(self, count: int, fingerprint: str) -> None:
        self._count = count
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = range(self._count)[index]
        return found if isinstance(found, int) else list(found)

    def __repr__(self) -> str:
        return f"StreamNumbers({self._count})"
