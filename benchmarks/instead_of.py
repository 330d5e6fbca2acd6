"""Batches of six published programs against this library over the same streams, by `testing.audit`.

Their order of reading is written anew in `hand_written.py`, after these files:

    openai/Video-Pre-Training 095519f       data_loader.py
    kimiyoung/transformer-xl 44781ed        pytorch/data_utils.py
    CraftJarvis/MineStudio f6a1c23          minestudio/data/minecraft/utils.py
    danijar/dreamerv3 e3f0224               embodied/core/replay.py, streams.py
    jbistanbul/MiniROAD 8307131             datasets/dataset.py
    akaraspt/tinysleepnet 70f45cf           minibatching.py

It takes seconds, and gives the same figures each time: streams are numbers, and nothing is decoded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import hand_written as theirs
import numpy as np
from interleaved import Row, figure
from program import run

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.testing import Audit, audit

__all__ = ["CASES", "Case", "audit_ours", "audit_theirs", "row", "share_going_on"]

KEYS: dict[str, Any] = {
    "ids": lambda batch: batch.ids,
    "positions": lambda batch: batch.positions,
    "starts": lambda batch: batch.starts,
}


class Case(NamedTuple):
    """A program, with data like its own.

    Attributes:
        lengths: Items of each stream.
        batch_size: Rows.
        batches: Makes the program's batches of an epoch, one function for each rank.
        options: Of a `StreamDataset` over the same streams.
    """

    lengths: list[int]
    batch_size: int
    batches: list[Callable[[], Iterator[theirs.Cells]]]
    options: dict[str, Any]


def _uneven(count: int, median: float, spread: float = 0.8) -> list[int]:
    """Lengths as recordings have them: a few are much longer than most."""
    lengths: list[int] = (median * np.random.default_rng(0).lognormal(0, spread, count)).astype(int).tolist()
    return lengths


RECORDINGS = _uneven(24, 150)
SENTENCES = _uneven(2000, 25, 0.5)
FILES = [SENTENCES[begin : begin + 500] for begin in range(0, 2000, 500)]
EPISODES = _uneven(120, 12)  # in windows of 128 frames
ENVIRONMENTS = [3000] * 8
VIDEOS = _uneven(60, 150)
NIGHTS: list[int] = np.random.default_rng(0).normal(1060, 170, 33).astype(int).tolist()

_PREDICTED = [length - 1 for length in SENTENCES]  # the last token is a target only
_PACKED = {"time_steps": 32, "windows": "packed"}

CASES = {
    "Video-Pre-Training, 8 workers": Case(
        RECORDINGS, 8, [lambda: theirs.queue_per_worker(RECORDINGS, 8, 8)], {"time_steps": 1}
    ),
    "Video-Pre-Training, 12 workers": Case(
        RECORDINGS, 8, [lambda: theirs.queue_per_worker(RECORDINGS, 12, 8)], {"time_steps": 1}
    ),
    "Transformer-XL, one text": Case(
        [3000] * 32, 32, [lambda: theirs.columns_of_text(96_020, 32, 70)], {"time_steps": 70}
    ),
    "Transformer-XL, sentences": Case(_PREDICTED, 32, [lambda: theirs.sentences_in_turn(SENTENCES, 32, 32)], _PACKED),
    "Transformer-XL, 4 files": Case(_PREDICTED, 32, [lambda: theirs.files_of_sentences(FILES, 32, 32)], _PACKED),
    "MineStudio, 1 rank": Case(EPISODES, 8, [lambda: theirs.rows_of_episodes(EPISODES, 8)], {"time_steps": 1}),
    "MineStudio, 4 ranks": Case(
        EPISODES,
        8,
        [functools.partial(theirs.rows_of_episodes, EPISODES, 8, rank, 4) for rank in range(4)],
        {"time_steps": 1},
    ),
    "Dreamer": Case(
        ENVIRONMENTS,
        16,
        [lambda: theirs.replay(ENVIRONMENTS, 16, 64, sum(ENVIRONMENTS) // (16 * 64))],
        {"time_steps": 64, "sections": 64},
    ),
    "MiniROAD": Case(VIDEOS, 16, [lambda: theirs.sliding_windows(VIDEOS, 16, 128, 4)], {"time_steps": 32}),
    "TinySleepNet": Case(NIGHTS, 15, [lambda: theirs.groups_of_nights(NIGHTS, 15, 20)], {"time_steps": 20}),
}


def audit_theirs(name: str) -> Audit:
    """Audit an epoch of a program."""
    case = CASES[name]
    loaders: list[Any] = list(case.batches)
    return audit(loaders, **KEYS, total=sum(case.lengths), epochs=1, name=name)


def audit_ours(name: str) -> Audit:
    """Audit an epoch of `StreamDataLoader` over the same streams, on as many rows."""
    case = CASES[name]
    options: dict[str, Any] = {
        "shuffle": True,
        "schedule": "balanced",
        "seed": 0,
        "lengths": case.lengths,
    } | case.options
    dataset = StreamDataset(case.lengths, range, case.batch_size, **options)
    ranks = len(case.batches)
    places: list[dict[str, Any]] = [{"rank": rank, "world_size": ranks} if ranks > 1 else {} for rank in range(ranks)]
    loaders = [StreamDataLoader(dataset, **place) for place in places]
    return audit(loaders, total=sum(case.lengths), epochs=1, name=f"ours in place of {name}")


def share_going_on(found: Audit) -> float:
    """Of the rows of batches, those that go on where the row before stopped, or begin a stream; not those reset."""
    kinds = found.between.kinds
    return (kinds.get("goes on", 0) + kinds.get("starts a stream", 0)) / found.between.moves


def row(name: str) -> str:
    """A program's row of the table of `docs/guides/instead-of.md`."""
    found, instead = audit_theirs(name), audit_ours(name)
    delivered = math.floor(1000 * found.delivered / (found.total or 1)) / 10  # only all of them are 100 %
    reads = 1 + found.repeats / found.delivered
    cells = f"{1 - found.padding:.2f} | {1 - instead.padding:.2f}"
    return f"| {name} | {100 * share_going_on(found):.0f} % | {delivered:.1f} % | {reads:.1f} | {cells} |"


def _rows(title: str, find: Callable[[str], Audit]) -> Iterable[Row]:
    for name in CASES:
        found = find(name)
        yield figure(title, f"{name}: delivered", [found.delivered / (found.total or 1)], "of 1")
        yield figure(title, f"{name}: rows go on", [share_going_on(found)], "of 1")
        yield figure(title, f"{name}: reads an item", [1 + found.repeats / found.delivered], "times")
        yield figure(title, f"{name}: padding", [found.padding], "of 1")


if __name__ == "__main__":
    run(
        __doc__,
        {
            "theirs": lambda _quick: _rows("theirs", audit_theirs),
            "ours": lambda _quick: _rows("ours", audit_ours),
        },
    )
