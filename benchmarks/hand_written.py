"""Which items six published programs put into which cells of their batches, written anew from reading them.

Guarantee: only the order of reading is here, as numbers of streams and items, so that an audit can count what it
delivers. Nothing is decoded. `instead_of.py` says where the originals are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Cells(NamedTuple):
    """A batch: which item each cell has.

    Attributes:
        ids: `(T, B)`, the stream; -1 is padding.
        positions: `(T, B)`, the item in its stream.
        starts: `(T, B)`, where the program resets its state, or is told that a stream starts.
    """

    ids: Array
    positions: Array
    starts: Array


def _cells(rows: Sequence[Sequence[tuple[int, int]]], resets: bool | None = None) -> Cells:
    """A batch of rows, each a window of (stream, item).

    `resets` says whether the state of each row is reset at its first cell, and nowhere else; None: where streams begin.
    """
    ids, positions = np.array(rows, np.int64).transpose(2, 1, 0)
    starts = positions == 0
    if resets is not None:
        first_real = (ids >= 0).argmax(0)
        starts = (np.arange(len(ids))[:, None] == first_real) & resets
    return Cells(ids, positions, starts)


def queue_per_worker(lengths: Sequence[int], workers: int, batch_size: int, seed: int = 0) -> Iterator[Cells]:
    """Video-Pre-Training: each worker reads one recording after another, and cells ask the workers in turn.

    The epoch ends with the first worker that has nothing left. All workers are equally fast here.
    """
    order = iter(np.random.default_rng(seed).permutation(len(lengths)).tolist())

    def work() -> Iterator[tuple[int, int]]:
        for recording in order:  # the workers share it
            yield from ((recording, frame) for frame in range(lengths[recording]))

    asked = itertools.cycle([work() for _ in range(workers)])
    while True:
        batch = list(itertools.islice((next(worker, None) for worker in asked), batch_size))
        if None in batch:
            return
        yield _cells([[cell] for cell in batch if cell is not None])


def columns_of_text(tokens: int, batch_size: int, time_steps: int) -> Iterator[Cells]:
    """Transformer-XL, ordered text: cut into as many equal columns as rows. A column's last token is a target only."""
    column = tokens // batch_size
    for start in range(0, column - 1, time_steps):
        window = range(start, min(start + time_steps, column - 1))
        yield _cells([[(row, position) for position in window] for row in range(batch_size)])


def sentences_in_turn(
    lengths: Sequence[int], batch_size: int, time_steps: int, numbers: Sequence[int] | None = None
) -> Iterator[Cells]:
    """Transformer-XL, shuffled sentences: a row takes the next one on the very next time step.

    Its state is not reset there. When no sentence is left, the batch that is being filled is dropped, and what other
    rows still have of theirs.
    """
    coming = iter(range(len(lengths)) if numbers is None else numbers)
    rows: list[list[tuple[int, int]]] = [[] for _ in range(batch_size)]
    while True:
        for row in rows:
            while len(row) < time_steps:
                if (sentence := next(coming, None)) is None:
                    return
                # of each sentence the last token is a target only
                row += [(sentence, token) for token in range(lengths[sentence] - 1)]
        yield _cells([row[:time_steps] for row in rows], resets=False)
        rows = [row[time_steps:] for row in rows]


def files_of_sentences(files: Sequence[Sequence[int]], batch_size: int, time_steps: int) -> Iterator[Cells]:
    """Transformer-XL, many files: the same for each file, so that rows are cut where a file ends."""
    begin = 0
    lengths = [length for file in files for length in file]
    for file in files:
        yield from sentences_in_turn(lengths, batch_size, time_steps, range(begin, begin + len(file)))
        begin += len(file)


def rows_of_episodes(lengths: Sequence[int], batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[Cells]:
    """MineStudio: a row reads an episode to its end, then takes the next; ranks have equal shares of all windows.

    When no episode is left, an empty cell takes the next window of the first row that has one. The last batch is
    dropped if it is not full. Episodes are cut where a rank's share ends.
    """
    share = sum(lengths) // ranks
    first, stop = share * rank, share * (rank + 1)
    ends = np.cumsum(lengths).tolist()
    parts = [
        [(episode, window) for window in range(max(0, first - end + length), min(length, stop - end + length))]
        for episode, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    coming = iter([part for part in parts if part])
    rows: list[list[tuple[int, int]]] = [[] for _ in range(batch_size)]
    while True:
        for row in rows:
            if not row:
                row.extend(next(coming, []))
        batch = []
        for own in rows:
            donors = [row for row in (own, *rows) if row]
            if not donors:
                return
            batch.append([donors[0].pop(0)])
        yield _cells(batch)


def replay(lengths: Sequence[int], batch_size: int, time_steps: int, batches: int, seed: int = 0) -> Iterator[Cells]:
    """Dreamer: windows that begin anywhere, drawn with replacement; each begins with a reset.

    The streams are those of the environments; an episode ends within them.
    """
    begins = [(stream, at) for stream, n in enumerate(lengths) for at in range(n - time_steps + 1)]
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        drawn = [begins[rng.integers(len(begins))] for _ in range(batch_size)]
        yield _cells([[(stream, at + t) for t in range(time_steps)] for stream, at in drawn], resets=True)


def sliding_windows(
    lengths: Sequence[int], batch_size: int, window: int, stride: int, seed: int = 0
) -> Iterator[Cells]:
    """MiniROAD: windows of `window` frames, one every `stride` frames, of videos padded in front; all shuffled."""
    rng = np.random.default_rng(seed)
    begins = []
    for video, length in enumerate(lengths):
        first = int(rng.integers(stride))
        padded = length + window - 1
        begins += [(video, begin - window + 1) for begin in range(first, padded - window + 1, stride)]
    order = rng.permutation(len(begins)).tolist()
    for at in range(0, len(order), batch_size):
        drawn = [begins[one] for one in order[at : at + batch_size]]
        rows = [[(video if t >= 0 else -1, t) for t in range(begin, begin + window)] for video, begin in drawn]
        yield _cells(rows, resets=True)


def groups_of_nights(
    lengths: Sequence[int], batch_size: int, time_steps: int, skip: int = 5, seed: int = 0
) -> Iterator[Cells]:
    """TinySleepNet: as many nights as rows side by side, each padded to the longest; then the next group.

    Each night begins at a drawn epoch, 0 to `skip - 1`. Rows of a last group that is not full are padding.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths)).tolist()
    for at in range(0, len(order), batch_size):
        nights = [(night, int(rng.integers(skip))) for night in order[at : at + batch_size]]
        longest = max(lengths[night] - first for night, first in nights)
        for begin in range(0, longest, time_steps):
            rows = [
                [
                    (night, first + t) if first + t < lengths[night] else (-1, 0)
                    for t in range(begin, begin + time_steps)
                ]
                for night, first in nights
            ]
            rows += [[(-1, 0)] * time_steps] * (batch_size - len(rows))
            yield _cells(rows, resets=begin == 0)
