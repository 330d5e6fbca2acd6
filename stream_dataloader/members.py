"""`SideBySide`: datasets that have lanes of one batch each, and when their epoch ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from torch.utils.data import IterableDataset

from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataset import StreamDataset

__all__ = ["SideBySide"]


class SideBySide(IterableDataset[StreamBatch]):
    """What a loader of `side_by_side` reads: its `dataset`.

    Attributes:
        members: The datasets, each with the lanes that it has here.
        ends_with: When an epoch ends.
        endless: Which members never end.
    """

    lengths = None  # of one list; each member has its own

    def __init__(self, members: Sequence[StreamDataset], ends_with: Literal["first", "longest"] | int) -> None:
        super().__init__()
        self.members = tuple(members)
        self.ends_with = ends_with
        self.endless = tuple(member.is_endless for member in self.members)

    @property
    def batch_size(self) -> int:
        """Number of lanes, of all members together."""
        return sum(member.batch_size for member in self.members)

    @property
    def is_endless(self) -> bool:
        """No member ends."""
        return all(self.endless)

    def is_end(self, over: Sequence[bool]) -> bool:
        """Whether an epoch ends where these members have ended."""
        if isinstance(self.ends_with, int):
            return over[self.ends_with]
        ending = [own for own, endless in zip(over, self.endless, strict=True) if not endless]
        return (any(ending) if self.ends_with == "first" else all(ending)) if ending else False

    def count(self, steps: Callable[[int], int]) -> int:
        """Number of batches of an epoch.

        Args:
            steps: That of a member, by its number.

        Raises:
            TypeError: No member ends; or as `steps`.
        """
        if isinstance(self.ends_with, int):
            return steps(self.ends_with)
        counts = [steps(number) for number, endless in enumerate(self.endless) if not endless]
        if not counts:
            raise TypeError('all members have padding_mode="cycle", so there is no len(); pass batches_per_epoch=')
        return min(counts) if self.ends_with == "first" else max(counts)

    def __iter__(self) -> Iterator[StreamBatch]:
        raise TypeError("datasets side by side are read by the loader that side_by_side returns")
