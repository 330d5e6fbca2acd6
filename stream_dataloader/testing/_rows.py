"""Rows of any loader's batches as arrays: the item of each cell, and the moves of each row from cell to cell.

::

    batch 0, T = 2      batch 1              row 0's moves: a0 -> a1 inside a window, a1 -> a2 between two,
    row 0   a0 a1       row 0   a2 b0        a2 -> b0 inside one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stream_dataloader.batch import StreamBatch
from stream_dataloader.batch_sampler import LaneIndex

Array = npt.NDArray[Any]
Keys = Mapping[str, Callable[[Any], Any] | None]

#: Ways in which a row moves from one cell to the next, and those that keep a carried state right.
GOES_ON, IS_RESET, SKIPS, ENTERS, STARTS, LEAVES = range(6)
KINDS = (
    "goes on",
    "is reset in the middle",
    "skips or repeats",
    "enters another stream in the middle",
    "starts a stream",
    "leaves a stream early",
)
GOOD = (GOES_ON, IS_RESET, STARTS)

_OF_OURS: Keys = {
    "ids": lambda batch: batch.source_index,
    "positions": lambda batch: batch.position,
    "mask": lambda batch: batch.source_index >= 0,
    "starts": lambda batch: batch.is_first,
    "random": None,
}


def _of_sampler(name: str) -> Callable[[Any], Any]:
    """Return a key that reads an attribute of `LaneIndex`es, as `(T, B)`."""

    def read(batch: Any) -> Array:
        new = [index for index in batch if index.t >= getattr(batch, "context", 0)]
        return np.array([getattr(index, name) for index in new]).reshape(-1, new[-1].lane + 1)

    return read


_OF_INDICES: Keys = {
    "ids": _of_sampler("source_index"),
    "positions": _of_sampler("position"),
    "mask": None,
    "starts": _of_sampler("is_first"),
    "random": None,
}


def _own_keys(batch: Any) -> Keys | None:
    """Return the keys of a batch of this library, or None for other batches."""
    if isinstance(batch, StreamBatch):
        return _OF_OURS
    is_drawn = isinstance(batch, (list, tuple)) and batch and isinstance(batch[-1], LaneIndex)
    return _OF_INDICES if is_drawn else None


def knows_itself(batch: Any) -> bool:
    """Return True if a batch needs no keys."""
    return _own_keys(batch) is not None


class Ids:
    """Numbers for ids of any type; -1 and None are padding."""

    def __init__(self) -> None:
        self._number: dict[Any, int] = {}
        self.names: list[Any] = []

    def numbers(self, ids: Array) -> Array:
        if ids.dtype.kind in "iu":  # few ids in many cells
            listed, cells = np.unique(ids, return_inverse=True)
            return np.array([self._number_of(one) for one in listed.tolist()], np.int64)[cells].reshape(ids.shape)
        numbers = [self._number_of(one) for one in ids.reshape(-1).tolist()]
        return np.array(numbers, np.int64).reshape(ids.shape)

    def _number_of(self, one: Any) -> int:
        if one is None or one == -1:
            return -1
        if one not in self._number:
            self._number[one] = len(self.names)
            self.names.append(one)
        return self._number[one]


class Draws(NamedTuple):
    """Cells that a rank's loader delivered in one epoch, in order of time, without padding.

    Attributes:
        item: `(n, 2)` int64: the number of the id, and the position (0 where it is not known).
        row: The row of the batch.
        batch: The batch's number.
        starts: The loader's own flags; empty if it has none.
        random: Random numbers of the items; empty if they are not checked.
        sizes: The number of rows of each batch.
        cells: Number of cells, padding included.
        has_positions: Whether positions are known.
    """

    item: Array
    row: Array
    batch: Array
    starts: Array
    random: Array
    sizes: list[int]
    cells: int
    has_positions: bool

    def random_of_items(self) -> Iterator[tuple[tuple[int, int], float]]:
        """Yield each item with the random number drawn for it."""
        items = ((number, position) for number, position in self.item.tolist())
        return zip(items, self.random.tolist(), strict=True)


class Moves(NamedTuple):
    """Moves of rows from a cell to the next: the indices of both in the draws, and the kind."""

    old: Array
    new: Array
    kind: Array
    inside: Array  # both are in one window


def read(batches: Iterable[Any], keys: Keys, ids: Ids) -> Draws:
    """Read all batches into a table of their cells."""
    columns: dict[str, list[Array]] = {name: [] for name in ("ids", "positions", "row", "batch", "starts", "random")}
    sizes, cells, positioned = [], 0, False
    for number, given in enumerate(batches):
        batch = given.without_context() if isinstance(given, StreamBatch) else given
        known = _own_keys(batch) if keys["ids"] is None else None
        own: Keys = keys if known is None else {**known, "random": keys["random"]}
        id_of = own["ids"]
        if id_of is None:
            kind = type(batch).__name__
            raise TypeError(f"batch {number} is a {kind}; give ids=, a function of a batch that returns each row's id")
        numbers = ids.numbers(_table(id_of(batch), "ids", number, None))
        shape = numbers.shape
        tables = {
            name: _table(key(batch), name, number, shape)
            for name in ("positions", "mask", "starts", "random")
            if (key := own[name]) is not None
        }
        there = (numbers >= 0) & tables.get("mask", np.True_).astype(bool)
        sizes.append(shape[1])
        cells += numbers.size
        positioned = "positions" in tables
        time, row = there.nonzero()
        columns["ids"].append(numbers[there])
        columns["positions"].append(tables["positions"][there] if positioned else np.zeros(len(row), int))
        columns["row"].append(row)
        columns["batch"].append(np.full(len(time), number))
        for name in ("starts", "random"):
            if name in tables:
                columns[name].append(tables[name][there])
    found = {name: np.concatenate(own) if own else np.empty(0, np.int64) for name, own in columns.items()}
    item = np.stack([found["ids"], found["positions"].astype(np.int64)], 1)
    return Draws(
        item, found["row"], found["batch"], found["starts"].astype(bool), found["random"], sizes, cells, positioned
    )


def _table(value: Any, name: str, number: int, shape: tuple[int, ...] | None) -> Array:
    """Return a key of a batch as `(T, B)`; flags of shape `(B,)` belong to the first time step."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    array = np.asarray(value)
    if name == "random" and shape is not None and array.ndim > 2:  # numbers of any size: a sum tells them apart
        array = array.reshape(*array.shape[: len(shape)], -1).sum(-1)
    if array.ndim == 1:
        array = array[None]
    if name == "starts" and shape is not None and array.shape == (1, shape[1]):
        array = np.concatenate([array, np.zeros((shape[0] - 1, shape[1]), bool)])
    if array.ndim != 2 or (shape is not None and array.shape != shape):
        what = f"{name} of batch {number} has shape {np.shape(value)}"
        raise ValueError(f"{what}; it must be (B,) or (T, B), time first" + (f", as ids {shape}" if shape else ""))
    return array


def moves_of(draws: Draws, firsts: Array, lasts: Array, stride: int | None) -> Moves:
    """Classify each move of each row of an epoch.

    Args:
        firsts: The first position of each id.
        lasts: The last one.
        stride: Distance between the positions of neighbouring cells; None for any distance forward.
    """
    order = draws.row.argsort(kind="stable")
    old, new = order[:-1], order[1:]
    same_row = draws.row[old] == draws.row[new]
    old, new = old[same_row], new[same_row]
    (old_id, old_position), (new_id, new_position) = draws.item[old].T, draws.item[new].T
    same = old_id == new_id
    distance = new_position - old_position
    goes_on = same & (distance > 0 if stride is None else distance == stride) if draws.has_positions else same
    in_the_middle = new_position != firsts[new_id]
    is_reset = draws.starts[new] if len(draws.starts) else np.zeros(len(new), bool)
    kind = np.select(
        [goes_on, in_the_middle & is_reset, in_the_middle & same, in_the_middle, old_position == lasts[old_id]],
        [GOES_ON, IS_RESET, SKIPS, ENTERS, STARTS],
        LEAVES,
    )
    return Moves(old, new, kind, draws.batch[old] == draws.batch[new])
