"""`SideBySide`: datasets that share the lanes of a batch, and the end of their common epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from torch.utils.data import IterableDataset

from stream_dataloader._engine import options
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataset import StreamDataset

__all__ = ["SideBySide"]


class SideBySide(IterableDataset[StreamBatch]):
    """The `dataset` of a loader that `side_by_side` returns: the members, each with its number of lanes."""

    lengths = None  # there is no common list; each member has lengths of its own

    def __init__(self, members: Sequence[StreamDataset], ends_with: Literal["first", "longest"] | int) -> None:
        super().__init__()
        self.members = tuple(members)
        self.endless = tuple(member._is_endless for member in self.members)
        if isinstance(ends_with, str):
            options.choice("ends_with", ends_with, Literal["first", "longest"])
        elif self.endless[options.integer("ends_with", ends_with, 0, len(self.members) - 1)]:
            what = f"ends_with is {ends_with}, and members[{ends_with}] never ends"
            raise ValueError(f'{what}, with padding_mode="cycle"; choose another member')
        self.ends_with = ends_with

    def __repr__(self) -> str:
        return f"SideBySide({', '.join(map(repr, self.members))}, ends_with={self.ends_with!r})"

    @property
    def batch_size(self) -> int:
        return sum(member.batch_size for member in self.members)

    def is_end(self, over: Sequence[bool]) -> bool:
        """Return whether the epoch ends, given which members have ended."""
        if isinstance(self.ends_with, int):
            return over[self.ends_with]
        ending = [own for own, endless in zip(over, self.endless, strict=True) if not endless]
        return (any(ending) if self.ends_with == "first" else all(ending)) if ending else False

    def count(self, steps: Callable[[int], int]) -> int:
        """Return the number of batches of an epoch; `steps` returns a member's, by its number."""
        if isinstance(self.ends_with, int):
            return steps(self.ends_with)
        counts = [steps(number) for number, endless in enumerate(self.endless) if not endless]
        if not counts:
            raise TypeError('all members have padding_mode="cycle", so there is no len(); pass batches_per_epoch=')
        return min(counts) if self.ends_with == "first" else max(counts)

    def __iter__(self) -> Iterator[StreamBatch]:
        raise TypeError("datasets side by side are read by the loader that side_by_side returns")
