"""Cost of training with the loader: to carry a model's state from batch to batch.

    python benchmarks/training.py [--quick] [--json PATH]

The model is an LSTM of two layers of 256 on 64 lanes. One contender calls it on a loader's batches, the other calls
`RecurrentState.before` and `after` for the same batches. They take turns, so that a ratio holds on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from interleaved import Result, figure, ratio, take_turns
from program import run

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState

LANES, SIZE, LAYERS = 64, 256, 2
#: Of the forward pass, in a training step that is mostly backward pass.
LIMIT = 0.05


def open_noise(length: int) -> Iterator[torch.Tensor]:
    """A stream of `(256,)`; its numbers do not matter."""
    return iter(torch.randn(length, SIZE, generator=torch.Generator().manual_seed(length)))


def batches_of(time_steps: int, count: int) -> list[StreamBatch]:
    """Batches in which about every tenth lane starts a stream."""
    lengths = [time_steps * (4 + i % 13) for i in range(3 * LANES)]
    dataset = StreamDataset(lengths, open_noise, LANES, time_steps=time_steps, shuffle=True, seed=0)
    found: list[StreamBatch] = []
    for batch in StreamDataLoader(dataset):
        if len(found) == count:
            break
        found.append(batch)
    return found


def seconds_a_batch(call: Callable[[StreamBatch], object], batches: Sequence[StreamBatch]) -> float:
    """The mean time of a call."""
    begun = time.perf_counter()
    for batch in batches:
        call(batch)
    return (time.perf_counter() - begun) / len(batches)


def carried(name: str, time_steps: int, rounds: int, count: int, micro_batches: int = 1) -> list[Result]:
    """The time of `before` and `after`, and of the LSTM's forward pass, and their ratio."""
    lstm, batches = torch.nn.LSTM(SIZE, SIZE, LAYERS), batches_of(time_steps, count)
    states = {len(micro): lstm(micro.data)[1] for micro in batches[0].split_lanes(micro_batches)}
    split = [micro for batch in batches for micro in batch.split_lanes(micro_batches)]

    def carry() -> float:
        state = RecurrentState(batch_dim=1)

        def step(batch: StreamBatch) -> None:
            state.before(batch)
            state.after(batch, states[len(batch)])

        return seconds_a_batch(step, split)

    def forward() -> float:
        return seconds_a_batch(lambda batch: lstm(batch.data), split)

    times = take_turns({"carry": carry, "forward": forward}, rounds, name)
    target = LIMIT if time_steps > 1 and micro_batches == 1 else None
    return [
        figure(name, "before + after", [1e3 * seconds for seconds in times["carry"]], "ms"),
        figure(name, "forward pass", [1e3 * seconds for seconds in times["forward"]], "ms"),
        ratio(name, "before + after / forward pass", times, "carry", "forward", target),
    ]


def measure(quick: bool) -> Iterator[Result]:
    """All that is carried."""
    rounds, count = (5, 6) if quick else (15, 20)
    yield from carried("RecurrentState, LSTM 2 x 256, 64 lanes, 16 time steps", 16, rounds, count)
    yield from carried("the same, in 4 micro-batches", 16, rounds, count, micro_batches=4)
    yield from carried("the same, one time step a batch", 1, rounds, 4 * count)


if __name__ == "__main__":
    run(__doc__, {"carried": measure})
