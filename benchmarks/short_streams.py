"""Streams that are over at once: of three items, and sentences that are a source each.

- `three items`: 8 lanes, packed windows of 16 time steps; two workers with default options against one, and against
  one process. A stream is opened, read and closed for three items, so this is what a stream costs.
- `sentences`: arrays of 5 to 45 tokens, shuffled, 32 lanes of 64 time steps; inputs and targets. The peer is a loop
  over the same sentences in the same process, which fills each row with one sentence after another: it has them all
  in memory as tensors, and keeps no account of what it read.

The start of workers is not counted. Contenders take turns; see `interleaved`. Run it as
`python benchmarks/short_streams.py [--quick] [--json PATH]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from interleaved import Result, figure, ratio, take_turns
from program import run
from store_rows import rate_of

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import ArrayStream

LANES, TIME_STEPS, ITEMS = 8, 16, 3
ROWS, WINDOW = 32, 64


def three_items(source: int) -> Iterator[np.ndarray[Any, Any]]:
    """A stream of three small items."""
    for position in range(ITEMS):
        yield np.array([source, position])


def streams_of(workers: int, batches: int) -> float:
    """Streams a second."""
    count = (batches + 20) * LANES * TIME_STEPS // ITEMS
    dataset = StreamDataset(range(count), three_items, LANES, time_steps=TIME_STEPS, windows="packed")
    loader = StreamDataLoader(dataset, workers)
    return rate_of(loader, lambda _: LANES * TIME_STEPS // ITEMS, 10, batches)


def measure_three(quick: bool) -> list[Result]:
    """Two workers, one, and none."""
    batches = 200 if quick else 2_000
    contenders = {
        name: partial(streams_of, n, batches) for n, name in enumerate(["no workers", "1 worker", "2 workers"])
    }
    rounds = take_turns(contenders, 2 if quick else 9, "three items", warm_up=not quick)
    section = "streams of three items"
    return [
        *(figure(section, name, values, "1/s") for name, values in rounds.items()),
        ratio(section, "2 workers / 1 worker", rounds, "2 workers", "1 worker", 1.3, at_most=False),
        ratio(section, "1 worker / no workers", rounds, "1 worker", "no workers"),
    ]


def sentences_of(count: int) -> list[np.ndarray[Any, Any]]:
    """Sentences as arrays of tokens; the last one of each is only a target."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 30_000, length) for length in rng.integers(5, 46, count)]


def through_loader(sentences: list[Any], batches: int) -> float:
    """Tokens a second from the loader, a source per sentence."""
    sources = [{"input": sentence[:-1], "target": sentence[1:]} for sentence in sentences]
    dataset = StreamDataset(
        sources, ArrayStream(), ROWS, time_steps=WINDOW, windows="packed", shuffle=True, seed=0, padding_mode="cycle"
    )
    return rate_of(StreamDataLoader(dataset), lambda _: ROWS * WINDOW, 4, batches)


def by_loop(sentences: list[Any], batches: int) -> float:
    """The same from a loop."""
    tensors = [torch.from_numpy(sentence) for sentence in sentences]

    def drawn() -> Iterator[torch.Tensor]:
        while True:
            for number in torch.randperm(len(tensors)).tolist():
                yield tensors[number]

    def windows() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        left, following = [tensors[0][:1]] * ROWS, drawn()
        while True:
            inputs = torch.zeros((WINDOW, ROWS), dtype=torch.int64)
            targets = torch.zeros((WINDOW, ROWS), dtype=torch.int64)
            for row in range(ROWS):
                t = 0
                while t < WINDOW:
                    sentence = left[row] if len(left[row]) > 1 else next(following)
                    count = min(len(sentence) - 1, WINDOW - t)
                    inputs[t : t + count, row] = sentence[:count]
                    targets[t : t + count, row] = sentence[1 : count + 1]
                    left[row] = sentence[count:]
                    t += count
            yield inputs, targets

    return rate_of(windows(), lambda _: ROWS * WINDOW, 4, batches)


def measure_sentences(quick: bool) -> list[Result]:
    """Tokens a second of both."""
    sentences, batches = sentences_of(5_000 if quick else 50_000), 100 if quick else 1_000
    contenders = {"loader": partial(through_loader, sentences, batches), "loop": partial(by_loop, sentences, batches)}
    rounds = take_turns(contenders, 2 if quick else 9, "sentences", warm_up=not quick)
    section = "sentences, a source each, in process"
    return [
        *(figure(section, name, values, "it/s") for name, values in rounds.items()),
        ratio(section, "loader / loop", rounds, "loader", "loop", 0.7, at_most=False),
    ]


if __name__ == "__main__":
    run(__doc__, {"three items": measure_three, "sentences": measure_sentences})
