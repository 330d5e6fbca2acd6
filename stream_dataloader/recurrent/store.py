"""Storage of lanes' states in pieces, each with the tensors of some lanes as the model returned them.

::

    batches                one piece         lanes 0 1 2 3 4 5
    parts, micro-batches   one for each      lanes 0 1 2 | 3 4 5

Guarantee: no tensor is ever changed in place, so autograd may hold any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader.recurrent.states import Lanes, States


class FiniteCheck:
    """Check that all numbers of some lanes' states are finite.

    Only if their sum is not finite, each number is checked. It is copied from a CUDA device while training goes on.
    """

    def __init__(self, states: States) -> None:
        self._states = states.map(lambda leaf, _: leaf.detach())
        sums = [_sum(leaf) for leaf in self._states.leaves if leaf.is_floating_point() or leaf.is_complex()]
        self._copied: torch.cuda.Event | None = None
        self._total = torch.zeros((), dtype=torch.float32, device="cpu")
        for i, one in enumerate(sums):
            self._total = self._total.to(one.device) + one if i else one
        if self._total.device.type == "cuda":
            device = self._total.device
            self._total = self._total.to("cpu", non_blocking=True)  # into page-locked memory
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))

    def __getstate__(self) -> dict[str, Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self.__dict__ | {"_copied": None}

    def bad(self) -> npt.NDArray[np.bool_]:
        """Wait for the sum; return `(B,)`: the lane's state holds NaN or infinity."""
        if self._copied is not None:
            self._copied.synchronize()
        states = self._states
        found = np.zeros(states.leaves[0].shape[states.dims[0]], np.bool_)
        if math.isfinite(self._total.item()):
            return found
        for leaf, dim in zip(states.leaves, states.dims, strict=True):
            finite = torch.isfinite(leaf).movedim(dim, 0).reshape(len(found), -1).all(1)
            found |= ~finite.cpu().numpy()
        return found


def _sum(leaf: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's numbers, in single precision at least."""
    real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    return real.sum(dtype=torch.float64 if real.dtype == torch.float64 else torch.float32)


class Piece:
    """States of some lanes. Their gradient goes back `uncut` windows; `check` looks for NaN and infinity."""

    def __init__(self, lanes: Lanes, states: States, *, uncut: int = 0, is_checked: bool = False) -> None:
        self.lanes, self.states, self.uncut = lanes, states, uncut
        self.check = FiniteCheck(states) if is_checked else None

    def like(self, lanes: Lanes, states: States, uncut: int) -> Piece:
        return Piece(lanes, states, uncut=uncut, is_checked=self.check is not None)

    def columns(self, rows: Lanes) -> Piece:
        return self.like(self.lanes[rows], self.states.columns(rows), self.uncut)

    def to(self, device: torch.device) -> Piece:
        return self.like(self.lanes, self.states.to(device), self.uncut)


class LaneStore:
    """Table of the pieces. It is never changed in place, so a shallow copy is enough."""

    def __init__(self) -> None:
        self._pieces: dict[bytes, Piece] = {}

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces.values())

    @property
    def lanes(self) -> Lanes:
        found = [piece.lanes for piece in self]
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    @property
    def known(self) -> States | None:
        """Example of the states with their structure and shapes, or None without any."""
        return next((piece.states for piece in self), None)

    @property
    def uncut(self) -> int:
        """Largest number of windows that the gradient of a lane goes back."""
        return max((piece.uncut for piece in self), default=0)

    def put(self, piece: Piece) -> None:
        key = piece.lanes.tobytes()
        if key not in self._pieces:
            self.drop(piece.lanes)
        self._pieces = self._pieces | {key: piece}

    def drop(self, lanes: Lanes) -> None:
        kept = {}
        for piece in self:
            stays = ~np.isin(piece.lanes, lanes)
            if stays.any():
                rest = piece if stays.all() else piece.columns(np.flatnonzero(stays))
                kept[rest.lanes.tobytes()] = rest
        self._pieces = kept

    def get(self, lanes: Lanes) -> Piece | None:
        """Return the states of some lanes, with zeros for unknown lanes, or None if no state is kept at all."""
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
    """Join pieces into one, with zeros for lanes that none of them has."""
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
