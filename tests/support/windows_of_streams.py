"""Batches of windows of both kinds, and how many of their items have other outputs than their stream has alone."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info

LENGTHS = [13, 4, 1, 9, 22, 3, 5, 8, 2, 17, 6, 1, 1, 11]
STEPS, LANES = 5, 4
WINDOWS = pytest.mark.parametrize("windows", ["aligned", "packed"])


def opening(make):
    """Streams of what is made of their sources' numbers."""
    return lambda length: iter(make(get_stream_info().source_index))


def batches_of(open_stream, windows, **options):
    options = {"time_steps": STEPS, "shuffle": True, "seed": 3, "windows": windows} | options
    return list(StreamDataLoader(StreamDataset(LENGTHS, open_stream, LANES, **options)))


def with_late_lanes(batches, fill):
    """The same windows where some lanes come late: they are padded meanwhile, as those of `streams.live`."""
    rng, lanes = np.random.default_rng(0), []
    padding = {"data": fill, "is_first": False, "mask": False, "source_index": -1, "position": -1}
    for _ in range(LANES):
        windows = []
        for batch in batches:
            windows += [None] * int(rng.integers(0, 3)) + [batch]
        lanes.append(windows)
    for step, windows in enumerate(itertools.zip_longest(*lanes)):
        columns = {
            name: torch.stack(
                [
                    torch.full_like(getattr(batches[0], name)[:, 0], fill)
                    if batch is None
                    else getattr(batch, name)[:, lane]
                    for lane, batch in enumerate(windows)
                ],
                dim=1,
            )
            for name, fill in padding.items()
        }
        yield dataclasses.replace(batches[0], **columns, reset=columns["is_first"][0], batch_index=step)


def differing(batch, outputs, expected, error=1e-5):
    """How many items have other outputs `(T, B, ...)` than `expected[source]` has at their position."""
    wrong = 0
    for t, b in (batch.source_index >= 0).nonzero().tolist():
        alone = expected[batch.source_index[t, b].item()][batch.position[t, b].item()]
        wrong += bool(abs(outputs[t, b] - alone).max() > error)
    return wrong
