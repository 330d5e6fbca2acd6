"""What a running stream can know of itself: its source, epoch, lane, worker and random generators.

Guarantee: random numbers depend on (seed, epoch, source) alone, on `repeat` where a source comes again, and with
`rng_at` on the position.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng

__all__ = ["StreamInfo", "get_stream_info"]

_ORDER, _STREAM, _POSITION, _CUTS = range(4)  # part of each key, so that no two purposes share random numbers


def order_rng(seed: int, epoch: int, *part: int) -> Generator:
    """The generator that shuffles an epoch, or a part of it with an order of its own."""
    return default_rng(SeedSequence(seed, spawn_key=(_ORDER, epoch, *part)))


def cuts_key(seed: int, epoch: int) -> int:
    """64 random bits, from which it is drawn where the sources of an epoch are cut into sections."""
    return int(SeedSequence(seed, spawn_key=(_CUTS, epoch)).generate_state(1, np.uint64)[0])


@dataclass(frozen=True, eq=False)
class StreamInfo:
    """What `get_stream_info()` returns inside a stream.

    Attributes:
        source_index: Index of the stream's source in `sources`.
        epoch: Epoch number; with `padding_mode="cycle"` each pass over the sources counts as one.
        lane: Row of the batch that the stream is read into.
        worker_id: The worker that reads the stream; 0 with `num_workers=0`. Results that must not depend on the number
            of workers must not use it.
        seed: The dataset's seed.
        repeat: How often the source was handed out before in this epoch as something new. Always 0, except with
            `interleave(..., exhausted="repeat")`.
        start: The first item that is read of the source, and
        stop: the item behind the last, if the dataset cuts its sources into `sections`; else 0 and None.
    """

    source_index: int
    epoch: int
    lane: int
    worker_id: int
    seed: int
    repeat: int = 0
    start: int = 0
    stop: int | None = None

    @cached_property
    def rng(self) -> Generator:
        """A generator seeded from (seed, epoch, source), for draws that are made while the stream opens.

        Of a section it is seeded from `start` too, so each section of a source has draws of its own.
        """
        key = (_STREAM, self.epoch, self.source_index, *self._again)
        if self.start:
            key = (*key[:3], self.repeat, self.start)
        return default_rng(SeedSequence(self.seed, spawn_key=key))

    def rng_at(self, position: int) -> Generator:
        """A new generator seeded from (seed, epoch, source, position), for the draws of one item.

        Unlike `rng` it does not depend on earlier draws. So a stream that starts in the middle draws the same numbers
        there as one that is read from its beginning.

        Args:
            position: Index of the item within its stream, 0 or more.
        """
        key = (_POSITION, self.epoch, self.source_index, position, *self._again)
        return default_rng(SeedSequence(self.seed, spawn_key=key))

    @property
    def _again(self) -> tuple[int, ...]:
        return (self.repeat,) if self.repeat else ()


class _Current(threading.local):
    info: StreamInfo | None = None


#: What runs in this thread; `run_as` sets it, and inner loops do so themselves.
running = _Current()


def get_stream_info() -> StreamInfo | Any:
    """Return the `StreamInfo` of the stream that is running, or None outside of one.

    For type checkers the result is `StreamInfo | Any`: a stream need not check for None.

    It works in the factory and in the stream's iterator, in any worker, and in the background thread that opens streams
    early. `torch.utils.data.get_worker_info` is its model.

    Example:
        >>> from stream_dataloader import StreamDataset, StreamDataLoader, get_stream_info
        >>> def open_noise(length):
        ...     info = get_stream_info()
        ...     for position in range(length):
        ...         yield info.rng_at(position).standard_normal(3)
        >>> loader = StreamDataLoader(StreamDataset([4, 2], open_noise, batch_size=2, time_steps=2, seed=1))
        >>> [tuple(batch.data.shape) for batch in loader]
        [(2, 2, 3), (2, 2, 3)]
    """
    return running.info


def run_as(info: StreamInfo | None) -> StreamInfo | None:
    """Set what `get_stream_info` returns in this thread; returns the value before."""
    before, running.info = running.info, info
    return before
