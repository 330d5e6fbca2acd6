"""Cost of the bookkeeping fields of packed batches: `is_first`, `mask` and the others, made on request.

Sixteen lanes of 1,024 time steps, some forty streams in a batch. Each field is asked of batches of which nothing was
asked before, so a figure is the whole cost of it; `seq_idx`, `cu_seqlens` and `position_ids` are those of
`stream_dataloader.recurrent`. A figure is the median of rounds, of which each counts its fastest batch: what else a
machine does makes batches slower, never faster.

Contenders take turns; see `interleaved`. Run it as `python benchmarks/bookkeeping.py [--quick] [--json PATH]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
from interleaved import Result, figure, take_turns
from program import run

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset, recurrent
from stream_dataloader.streams import ArrayStream

LANES, TIME_STEPS, STREAMS = 16, 1024, 2600
#: What is asked, how, and microseconds that it may take.
ASKED: dict[str, tuple[Callable[[StreamBatch], Any], float]] = {
    "is_first": (attrgetter("is_first"), 40),
    "mask": (attrgetter("mask"), 40),
    "source_index": (attrgetter("source_index"), 60),
    "position": (attrgetter("position"), 60),
    "seq_idx": (recurrent.seq_idx, 40),
    "cu_seqlens": (recurrent.cu_seqlens, 40),
}


def fastest(ask: Callable[[StreamBatch], Any], sources: list[Any], count: int) -> float:
    """Microseconds that the fastest of so many batches takes to answer."""
    dataset = StreamDataset(sources, ArrayStream(), LANES, time_steps=TIME_STEPS, windows="packed")
    best = float("inf")
    for batch in list(islice(StreamDataLoader(dataset), count)):
        begin = time.perf_counter()
        ask(batch)
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def measure_packed(quick: bool) -> Iterator[Result]:
    """All fields, each by epochs of its own."""
    lengths = np.random.default_rng(0).integers(300, 1066, STREAMS)
    sources = [np.arange(length) for length in lengths]
    contenders = {name: partial(fastest, ask, sources, 30 if quick else 100) for name, (ask, _) in ASKED.items()}
    rounds = take_turns(contenders, 3 if quick else 9, "packed windows")
    for name, (_, limit) in ASKED.items():
        yield figure("packed windows, 16 x 1,024, some 40 streams", name, rounds[name], "us", limit)


if __name__ == "__main__":
    run(__doc__, {"packed": measure_packed})
