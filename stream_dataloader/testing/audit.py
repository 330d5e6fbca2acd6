"""Audit of any loader: whether a state can be carried through its rows, and which data an epoch delivers.

The audit looks only at ids and positions. So it accepts any loader or sampler: torch's, another library's, or a
hand-written one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._engine import options
from stream_dataloader._engine.hints import hinted
from stream_dataloader.testing._rows import GOES_ON, GOOD, KINDS, Draws, Ids, Moves, knows_itself, moves_of, read

__all__ = ["Audit", "RowMoves", "audit"]

Key = Callable[[Any], Any] | None


class RowMoves(NamedTuple):
    """Moves of rows from cell to cell.

    Attributes:
        moves: Number of moves.
        right: Number of moves that continue a stream, start one, or are marked as a start by the loader.
        kinds: Number of moves of each kind.
        first_wrong: The first wrong move; empty if there is none.
    """

    moves: int
    right: int
    kinds: dict[str, int]
    first_wrong: str


@dataclasses.dataclass(frozen=True)
class Audit:
    """Findings of an audit; `print(audit)` shows them.

    Attributes:
        name: Name of the audited loader.
        ranks: Number of ranks whose loaders were read.
        epochs: Number of epochs read.
        between: Moves of rows from batch to batch.
        inside: Moves of rows inside windows.
        flags: The loader's own start flags: the number of those that are right, of those that are missing where a row
            does not continue, and of those that are set where it does. None if the loader has no flags.
        backward: Number of items that come after a later item of their stream, on one rank in one epoch.
        delivered: Number of items in the first epoch; of streams, where positions are not known.
        delivered_in_all: Number of items in all epochs.
        total: Number of items of the data set, if it is known.
        repeats: Number of times that the first epoch has an item again.
        padding: Share of cells that are padding.
        batch_sizes: Number of batches for each number of rows.
        same_draws: Whether two epochs have the same items in the same order. None if one epoch was read.
        same_random: Share of items whose random numbers are the same in two epochs. None if it is not known.
        rank_batches: Number of batches of each rank in the first epoch.
        on_several_ranks: Number of items of the first epoch that more than one rank has.
        wrong: Names of the lines to look at. Empty if a state can be carried, and if each epoch reads each item once
            and in another order. Audit a loader that is meant to read alike in each epoch with `epochs=1`.
    """

    name: str
    ranks: int
    epochs: int
    between: RowMoves
    inside: RowMoves
    flags: tuple[int, int, int] | None
    backward: int
    delivered: int
    delivered_in_all: int
    total: int | None
    repeats: int
    padding: float
    batch_sizes: dict[int, int]
    same_draws: bool | None
    same_random: float | None
    rank_batches: list[int]
    on_several_ranks: int
    wrong: list[str] = dataclasses.field(default_factory=list)
    _lines: list[str] = dataclasses.field(default_factory=list, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as plain data."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del found["_lines"]
        return found | {"between": self.between._asdict(), "inside": self.inside._asdict()}

    def __str__(self) -> str:
        many = len(self.wrong)
        verdict = f"{many} to look at: {', '.join(self.wrong)}" if many else "rows go on, and each item is read once"
        head = f"{self.name or 'loader'} (ranks: {self.ranks}, epochs: {self.epochs})"
        return "\n".join([head, *self._lines, f"  {verdict}"])


@hinted
def audit(
    loader: Any,
    *,
    ids: Key = None,
    positions: Key = None,
    mask: Key = None,
    starts: Key = None,
    random: Key = None,
    total: int | None = None,
    stride: int | None = 1,
    epochs: int = 2,
    batches: int | None = None,
    name: str = "",
) -> Audit:
    """Read a loader, and check whether its rows continue from batch to batch and which items it delivers.

    Each key is a function of a batch that returns an array `(B,)`, or `(T, B)` with time first. `StreamBatch` needs no
    keys, and neither do the batches of a `LaneBatchSampler`. The first and last position of a stream are those that
    were read, so an item that no epoch delivers is noticed only if `total` is given. The audit keeps some 50 bytes for
    each item read.

    Args:
        loader: An iterable of batches, a function that makes one, or a list of these with one for each rank.
        ids: The stream of a cell, as a number or text. Give one id to each sequence that a state may be carried
            through: to a section of a file, not to the file. -1 or None is padding.
        positions: The index of the item in its stream. None: only ids are compared.
        mask: False where the cell is padding.
        starts: The loader's flags for "a stream starts" or "reset the state". Of shape `(B,)`, they belong to the
            first time step.
        random: Random numbers drawn for the item, of any shape behind `(T, B)` or `(B,)`. They should differ from
            epoch to epoch.
        total: Number of items of the data set; of streams, without `positions`.
        stride: Distance between the positions of neighbouring items. None: any distance forward.
        epochs: Number of epochs to read.
        batches: Largest number of batches to read from an epoch, for large data and endless loaders.
        name: Name of the loader in the report.

    Returns:
        The findings; `assert not audit(...).wrong` is a test.

    Raises:
        TypeError: The batches are not of this library, and `ids` is not given.
        ValueError: The shape of a key does not match the ids, or an iterator would have to be read twice.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from stream_dataloader.testing import audit
        >>> frames = [(episode, frame) for episode in range(4) for frame in range(6)]
        >>> loader = DataLoader(frames, batch_size=4)
        >>> print(audit(loader, ids=lambda b: b[0], positions=lambda b: b[1], total=24, epochs=1))
        loader (ranks: 1, epochs: 1)
          ! rows between batches 0.0 % of 20 right: enters another stream in the middle 9, skips or repeats 8, leaves...
            order in each stream 100.0 % of steps go forward
            delivered            24 items in the first epoch, 100.0 % of 24
            read again           0 times in the first epoch
            padding              0.0 % of cells
          1 to look at: rows between batches
    """
    keys = {"ids": ids, "positions": positions, "mask": mask, "starts": starts, "random": random}
    epochs = options.integer("epochs", epochs, 1)
    limit = None if batches is None else options.integer("batches", batches, 1)
    numbered = Ids()
    loaders = _loaders(loader, epochs)
    read_epochs = [[read(_opened(one, limit), keys, numbered) for one in loaders] for _ in range(epochs)]
    return _Report(read_epochs, numbered, stride, total, cut=limit is not None).audit(name)


def _loaders(loader: Any, epochs: int) -> list[Any]:
    """Return one loader for each rank."""
    is_list = isinstance(loader, (list, tuple))
    if is_list and loader and knows_itself(loader[0]):
        is_list = False  # the batches of one rank
    found = list(loader) if is_list else [loader]
    for one in found:
        if epochs > 1 and not callable(one) and hasattr(one, "__next__"):
            raise ValueError(f"a {type(one).__name__} can be read once; give a function that makes one, or epochs=1")
    return found


def _opened(loader: Any, limit: int | None) -> Iterable[Any]:
    made = loader() if callable(loader) else loader
    return itertools.islice(made, limit)


class _Report:
    """Counts of the epochs of all ranks, with a line of text about each."""

    def __init__(
        self, epochs: Sequence[Sequence[Draws]], ids: Ids, stride: int | None, total: int | None, *, cut: bool
    ) -> None:
        self._epochs, self._ids, self._total, self._cut = epochs, ids, total, cut
        self._every = [draws for ranks in epochs for draws in ranks]
        firsts = np.full(len(ids.names), np.iinfo(np.int64).max)
        lasts = np.full(len(ids.names), np.iinfo(np.int64).min)
        for draws in self._every:
            np.minimum.at(firsts, draws.item[:, 0], draws.item[:, 1])
            np.maximum.at(lasts, draws.item[:, 0], draws.item[:, 1])
        self._moves = [moves_of(draws, firsts, lasts, stride) for draws in self._every]
        self._lines: list[str] = []
        self._wrong: list[str] = []

    def _line(self, name: str, text: str, *, wrong: bool = False) -> None:
        self._lines.append(f"  {'!' if wrong else ' '} {name:<21}{text}")
        if wrong:
            self._wrong.append(name)

    def audit(self, name: str) -> Audit:
        first_epoch = self._epochs[0]
        between, inside = self._rows("rows between batches", False), self._rows("rows inside windows", True)
        flags, backward = self._flags(), self._order()
        counts = [Counter(map(tuple, np.concatenate([d.item for d in ranks]).tolist())) for ranks in self._epochs]
        items, in_all = len(counts[0]), len(set().union(*counts))
        has_positions = any(draws.has_positions for draws in self._every)
        repeats = sum(counts[0].values()) - items if has_positions else 0
        text = f"{items:,} {'items' if has_positions else 'streams'} in the first epoch"
        text += "" if self._total is None else f", {_share(items, self._total)} of {self._total:,}"
        text += f"; {in_all:,} in all {len(counts)} epochs" if len(counts) > 1 else ""
        missing = self._total is not None and items < self._total and not self._cut
        self._line("delivered", text, wrong=missing or not items)
        if has_positions:
            self._line("read again", f"{repeats:,} times in the first epoch", wrong=repeats > 0)
        cells = sum(draws.cells for draws in self._every)
        padded = cells - sum(len(draws.item) for draws in self._every)
        self._line("padding", f"{_share(padded, cells)} of cells")
        sizes = Counter(itertools.chain.from_iterable(draws.sizes for draws in self._every))
        if len(sizes) > 1:
            self._line("sizes of batches", _counted(sizes), wrong=True)
        same_draws = self._same_draws()
        same_random = self._same_random()
        rank_batches = [len(draws.sizes) for draws in first_epoch]
        shared = Counter(itertools.chain.from_iterable({*map(tuple, draws.item.tolist())} for draws in first_epoch))
        on_several = sum(count > 1 for count in shared.values())
        if len(first_epoch) > 1:
            self._line("batches of ranks", str(rank_batches), wrong=len(set(rank_batches)) > 1)
            self._line("items on two ranks", f"{on_several:,}", wrong=on_several > 0)
        return Audit(
            name=name,
            ranks=len(first_epoch),
            epochs=len(self._epochs),
            between=between,
            inside=inside,
            flags=flags,
            backward=backward,
            delivered=items,
            delivered_in_all=in_all,
            total=self._total,
            repeats=repeats,
            padding=padded / cells if cells else 0.0,
            batch_sizes=dict(sizes),
            same_draws=same_draws,
            same_random=same_random,
            rank_batches=rank_batches,
            on_several_ranks=on_several,
            wrong=self._wrong,
            _lines=self._lines,
        )

    def _rows(self, title: str, inside: bool) -> RowMoves:
        kinds: Counter[int] = Counter()
        first_wrong = ""
        for number, moves in enumerate(self._moves):
            own = moves.inside == inside
            kinds.update(moves.kind[own].tolist())
            bad = np.flatnonzero(own & ~np.isin(moves.kind, GOOD))
            if len(bad) and not first_wrong:
                first = bad[self._every[number].batch[moves.new[bad]].argmin()]
                first_wrong = self._place(number, moves, int(first))
        count, right = sum(kinds.values()), sum(kinds[kind] for kind in GOOD)
        named = {KINDS[kind]: many for kind, many in kinds.most_common()}
        if count:
            text = f"{_share(right, count)} of {count:,} right: {_counted(named)}"
            self._line(title, text + (f"; {first_wrong}" if first_wrong else ""), wrong=right < count)
        return RowMoves(count, right, named, first_wrong)

    def _place(self, number: int, moves: Moves, at: int) -> str:
        epoch, rank = divmod(number, len(self._epochs[0]))
        draws, old, new = self._every[number], moves.old[at], moves.new[at]
        where = f"epoch {epoch}, " + (f"rank {rank}, " if len(self._epochs[0]) > 1 else "")
        where += f"batch {draws.batch[new]}, row {draws.row[new]}"
        (old_id, old_position), (new_id, new_position) = draws.item[old], draws.item[new]
        names = self._ids.names
        return f"{where}: {names[old_id]} at {old_position}, then {names[new_id]} at {new_position}"

    def _flags(self) -> tuple[int, int, int] | None:
        right = missing = extra = 0
        for draws, moves in zip(self._every, self._moves, strict=True):
            if len(draws.starts):
                flag, goes_on = draws.starts[moves.new], moves.kind == GOES_ON
                right += int((flag != goes_on).sum())
                missing += int((~flag & ~goes_on).sum())
                extra += int((flag & goes_on).sum())
        if not any(len(draws.starts) for draws in self._every):
            return None
        text = f"{right:,} right; missing {missing:,}, set where a row goes on {extra:,}"
        self._line("start flags", text, wrong=missing + extra > 0)
        return right, missing, extra

    def _order(self) -> int:
        """Count the items that come after a later item of their stream."""
        forward = backward = 0
        for draws in self._every:
            order = draws.item[:, 0].argsort(kind="stable")
            item = draws.item[order]
            distance = np.diff(item[:, 1])[item[1:, 0] == item[:-1, 0]]
            forward += int((distance > 0).sum())
            backward += int((distance < 0).sum())
        if forward + backward:
            text = f"{_share(forward, forward + backward)} of steps go forward"
            self._line("order in each stream", text, wrong=backward > 0)
        return backward

    def _same_draws(self) -> bool | None:
        if len(self._epochs) == 1:
            return None
        one, other = self._epochs[:2]
        same = all(np.array_equal(a.item, b.item) for a, b in zip(one, other, strict=True))
        self._line(
            "epochs", "the same items in the same order" if same else "other items, or another order", wrong=same
        )
        return same

    def _same_random(self) -> float | None:
        """Return the share of items that have the same random numbers in the first two epochs."""
        if len(self._epochs) == 1 or not any(len(draws.random) for draws in self._every):
            return None
        one, other = (
            {
                tuple(item): number
                for draws in ranks
                for item, number in zip(draws.item.tolist(), draws.random.tolist(), strict=True)
            }
            for ranks in self._epochs[:2]
        )
        both = one.keys() & other.keys()
        same = sum(one[item] == other[item] for item in both)
        self._line("random numbers", f"{_share(same, len(both))} the same in both epochs", wrong=same > len(both) / 2)
        return same / len(both) if both else None


def _share(part: int, whole: int) -> str:
    """Format a share, rounded down so that only all of them are 100 %."""
    return f"{1000 * part // whole / 10} %" if whole else "none"


def _counted(counts: Any) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
