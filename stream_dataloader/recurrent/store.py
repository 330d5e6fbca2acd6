"""Keeps the lanes' states in pieces: the tensors of some lanes, as the model returned them.

::

    batches                one piece         lanes 0 1 2 3 4 5
    parts, micro-batches   one for each      lanes 0 1 2 | 3 4 5

What comes back as it was given costs no copy. Where a batch has other lanes than any piece, columns are put together.

Guarantee: no tensor is ever changed in place, so autograd may hold any of them. Every lane is in one piece at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader.recurrent.finite import FiniteCheck
from stream_dataloader.recurrent.tree import blended

Lanes = npt.NDArray[np.int64]


class Piece:
    """The states of some lanes.

    Args:
        lanes: The lanes' numbers.
        leaves: Their tensors, with the lanes side by side.
        dims: The dimension of the lanes in each tensor.
        uncut: How many windows the gradient goes back.
        is_checked: Whether somebody asks if all numbers are finite.

    Attributes:
        check: Says whether they are.
    """

    def __init__(
        self,
        lanes: Lanes,
        leaves: Sequence[torch.Tensor],
        dims: Sequence[int],
        *,
        uncut: int = 0,
        is_checked: bool = False,
    ) -> None:
        self.lanes, self.leaves, self.dims, self.uncut = lanes, leaves, dims, uncut
        self.check = FiniteCheck(leaves, dims) if is_checked else None

    def like(self, lanes: Lanes, leaves: Sequence[torch.Tensor], uncut: int | None = None) -> Piece:
        """Other lanes' states, made of these."""
        uncut = self.uncut if uncut is None else uncut
        return Piece(lanes, leaves, self.dims, uncut=uncut, is_checked=self.check is not None)

    def columns(self, rows: npt.NDArray[np.int64]) -> Piece:
        """Some of the lanes, by their place in the piece."""
        leaves = [
            leaf.index_select(dim, torch.from_numpy(rows).to(leaf.device, non_blocking=True))
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return self.like(self.lanes[rows], leaves)

    def to(self, device: torch.device) -> Piece:
        """The same on a device."""
        return self.like(self.lanes, [leaf.to(device, non_blocking=True) for leaf in self.leaves])


class LaneStore:
    """The pieces."""

    def __init__(self) -> None:
        self._pieces: dict[bytes, Piece] = {}

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces.values())

    def copy(self) -> LaneStore:
        """One that keeps the same pieces."""
        made = LaneStore()
        made._pieces = dict(self._pieces)
        return made

    @property
    def lanes(self) -> Lanes:
        """The lanes that have a state, in order."""
        found = [piece.lanes for piece in self]
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    @property
    def uncut(self) -> int:
        """How many windows the gradient of some lane goes back."""
        return max((piece.uncut for piece in self), default=0)

    def put(self, piece: Piece) -> None:
        """Keep a piece in place of what was kept for its lanes."""
        key = piece.lanes.tobytes()
        if key not in self._pieces:
            self.drop(piece.lanes)
        self._pieces[key] = piece

    def drop(self, lanes: Lanes) -> None:
        """Keep nothing for some lanes."""
        for key, old in list(self._pieces.items()):
            stays = ~np.isin(old.lanes, lanes)
            if not stays.all():
                del self._pieces[key]
                if stays.any():
                    rest = old.columns(np.flatnonzero(stays))
                    self._pieces[rest.lanes.tobytes()] = rest

    def get(self, lanes: Lanes) -> Piece | None:
        """The states of some lanes; those of which none is kept are zeros. None if that is all of them."""
        piece = self._pieces.get(lanes.tobytes())
        if piece is not None:
            return piece
        found = []
        for old in self:
            rows = np.flatnonzero(np.isin(old.lanes, lanes))
            if len(rows):
                found.append(old if len(rows) == len(old.lanes) else old.columns(rows))
        return _side_by_side(found, lanes) if found else None


def _side_by_side(pieces: Sequence[Piece], lanes: Lanes) -> Piece:
    """One piece of several, with its lanes in a given order, and zeros for lanes that none of them has."""
    like = pieces[0]
    there = np.concatenate([piece.lanes for piece in pieces])
    missing = np.setdiff1d(lanes, there)
    place = {lane: column for column, lane in enumerate(np.concatenate([there, missing]).tolist())}
    order = np.array([place[lane] for lane in lanes.tolist()])
    leaves = []
    for i, dim in enumerate(like.dims):
        columns = [piece.leaves[i].to(like.leaves[i].device) for piece in pieces]
        if len(missing):
            columns.append(zeros_like(like.leaves[i], dim, len(missing)))
        joined = columns[0] if len(columns) == 1 else torch.cat(columns, dim)
        if (order != np.arange(len(order))).any():
            joined = joined.index_select(dim, torch.from_numpy(order).to(joined.device, non_blocking=True))
        leaves.append(joined)
    return like.like(lanes, leaves, max(piece.uncut for piece in pieces))


def zeros_like(leaf: torch.Tensor, dim: int, lanes: int) -> torch.Tensor:
    """Zeros of a leaf's kind, for a number of lanes."""
    return leaf.new_zeros([lanes if i == dim else size for i, size in enumerate(leaf.shape)])


def with_idle(
    leaves: Sequence[torch.Tensor], dims: Sequence[int], kept: Piece | None, real: npt.NDArray[np.bool_]
) -> list[torch.Tensor]:
    """New states; but for lanes without an item those that are kept, or zeros."""
    old = [torch.zeros_like(leaf) for leaf in leaves] if kept is None else kept.leaves
    return blended(torch.from_numpy(~real), old, leaves, dims)
