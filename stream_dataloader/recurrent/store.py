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
import torch

from stream_dataloader.recurrent.finite import FiniteCheck
from stream_dataloader.recurrent.states import Lanes, States


class Piece:
    """The states of some lanes, through which the gradient goes back `uncut` windows; `check` looks for NaN."""

    def __init__(self, lanes: Lanes, states: States, *, uncut: int = 0, is_checked: bool = False) -> None:
        self.lanes, self.states, self.uncut = lanes, states, uncut
        self.check = FiniteCheck(states) if is_checked else None

    def like(self, lanes: Lanes, states: States, uncut: int) -> Piece:
        """Other lanes' states, made of these."""
        return Piece(lanes, states, uncut=uncut, is_checked=self.check is not None)

    def columns(self, rows: Lanes) -> Piece:
        """Some of the lanes, by their place in the piece."""
        return self.like(self.lanes[rows], self.states.columns(rows), self.uncut)

    def to(self, device: torch.device) -> Piece:
        """The same on a device."""
        return self.like(self.lanes, self.states.to(device), self.uncut)


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
    def known(self) -> States | None:
        """Some of the states, which show what all look like; None if there are none."""
        return next((piece.states for piece in self), None)

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
        """The states of some lanes; those of which none is kept are zeros. None if nothing is kept at all."""
        piece = self._pieces.get(lanes.tobytes())
        if piece is not None or not self._pieces:
            return piece
        found = []
        for old in self:
            rows = np.flatnonzero(np.isin(old.lanes, lanes))
            if len(rows):
                found.append(old if len(rows) == len(old.lanes) else old.columns(rows))
        return _side_by_side(found, lanes, next(iter(self)))


def _side_by_side(pieces: Sequence[Piece], lanes: Lanes, like: Piece) -> Piece:
    """One piece of several, with its lanes in a given order, and zeros for lanes that none of them has."""
    missing = np.setdiff1d(lanes, [lane for piece in pieces for lane in piece.lanes])
    states = [piece.states for piece in pieces] + ([like.states.zeros(len(missing))] if len(missing) else [])
    place = {lane: i for i, lane in enumerate(np.concatenate([*(piece.lanes for piece in pieces), missing]).tolist())}
    order = np.array([place[lane] for lane in lanes.tolist()])
    leaves = [
        columns[0] if len(columns) == 1 else torch.cat([column.to(columns[0].device) for column in columns], dim)
        for *columns, dim in zip(*(one.leaves for one in states), like.states.dims, strict=True)
    ]
    joined = States(like.states.node, leaves, like.states.dims)
    if (order != np.arange(len(order))).any():
        joined = joined.columns(order)
    return like.like(lanes, joined, max((piece.uncut for piece in pieces), default=0))
