"""Information for a running stream: its source, epoch, lane, worker and random generators.

Guarantee: random numbers depend on (seed, epoch, source) alone; on `repeat`, too, if a source is drawn again; and with
`rng_at` on the position.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng

__all__ = ["StreamInfo", "get_stream_info"]

# Each purpose has a number of its own in its keys, so that no two purposes share random numbers.
_ORDER, _STREAM, _POSITION, _CUTS, _PURPOSE, _WORKERS, _GLOBALS = range(7)

_MASK = 2**64 - 1
_MEMBER_BITS = 48  # a dataset has fewer sources than 2 to this power


def source_key(starts: Sequence[int], index: int) -> int:
    """Return what a source of several datasets is known by in random draws.

    It is made of the dataset and the index in it, so that it stays the same while an earlier dataset's list grows. In
    the first dataset it is the index.

    Args:
        starts: Index of each dataset's first source, over all datasets.
        index: Index of the source, over all datasets.
    """
    member = bisect_right(starts, index) - 1
    return (member << _MEMBER_BITS) + index - starts[member]


def order_rng(seed: int, epoch: int, *part: int) -> Generator:
    """Return the generator that shuffles an epoch, or a part of it with an order of its own."""
    return default_rng(SeedSequence(seed, spawn_key=(_ORDER, epoch, *part)))


def cuts_key(seed: int, epoch: int) -> int:
    """Return 64 random bits, from which the cuts of an epoch's sources into sections are drawn."""
    return int(SeedSequence(seed, spawn_key=(_CUTS, epoch)).generate_state(1, np.uint64)[0])


def stream_seed(info: StreamInfo) -> int:
    """Return the `StreamBatch.stream_seed` of a stream's steps: 64 random bits, as a signed number.

    A `SeedSequence` would take longer than opening a small stream; this is SplitMix64 with the keys as its steps. The
    source is the last one, as it is the only one that differs from most streams to the next.
    """
    bits = _mixed(_mixed_of_pass(info.seed, info.epoch, info.repeat), info.source_key)
    return bits - (bits >> 63 << 64)


@lru_cache(maxsize=64)
def _mixed_of_pass(seed: int, epoch: int, repeat: int) -> int:
    return _mixed(_mixed(seed, epoch), repeat)


def _mixed(bits: int, key: int) -> int:
    bits = (bits * 0x9E3779B97F4A7C15 + key + 1) & _MASK
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
    return bits ^ bits >> 31


def workers_seed(seed: int, *start: int) -> int:
    """Return the seed of worker processes' global generators, a different one for each start."""
    return int(SeedSequence(seed, spawn_key=(_WORKERS, *start)).generate_state(1, np.uint64)[0]) >> 1


@dataclass(frozen=True, eq=False, init=False)
class StreamInfo:
    """Information about the running stream, as `get_stream_info()` returns it.

    Attributes:
        source_index: Index of the stream's source in `sources`.
        epoch: Epoch number; with `padding_mode="cycle"` each pass over the sources counts as one.
        lane: Row of the batch that the stream is read into.
        worker_id: The worker that reads the stream; 0 with `num_workers=0`. Results that must not depend on the number
            of workers must not use it.
        seed: The dataset's seed.
        repeat: How often the source was drawn before in this epoch as new data. Always 0, except with
            `interleave(..., exhausted="repeat")`.
        start: First item of the section, if the dataset cuts its sources into `sections`; otherwise 0.
        stop: The item behind the section's last; None without sections.
        source_key: The source's number in random draws. It is `source_index`, except in an interleaved dataset: there
            it does not change when the list of another dataset grows.
    """

    source_index: int
    epoch: int
    lane: int
    worker_id: int
    seed: int
    repeat: int = 0
    start: int = 0
    stop: int | None = None
    source_key: int = 0

    def __init__(
        self,
        source_index: int,
        epoch: int,
        lane: int,
        worker_id: int,
        seed: int,
        repeat: int = 0,
        start: int = 0,
        stop: int | None = None,
        source_key: int | None = None,
    ) -> None:
        # Each stream has one. A frozen dataclass would set the fields one by one, which takes twice as long.
        vars(self).update(
            source_index=source_index,
            epoch=epoch,
            lane=lane,
            worker_id=worker_id,
            seed=seed,
            repeat=repeat,
            start=start,
            stop=stop,
            source_key=source_index if source_key is None else source_key,
        )

    @cached_property
    def rng(self) -> Generator:
        """A generator seeded from (seed, epoch, source), for draws while the stream opens.

        For a section it is also seeded from `start`, so each section of a source has draws of its own.
        """
        key = (_STREAM, self.epoch, self.source_key, *self._again)
        if self.start:
            key = (*key[:3], self.repeat, self.start)
        return default_rng(SeedSequence(self.seed, spawn_key=key))

    def rng_at(self, position: int) -> Generator:
        """Return a new generator seeded from (seed, epoch, source, position), for the draws of one item.

        Unlike `rng` it does not depend on earlier draws. So a stream that starts in the middle draws the same numbers
        there as one that is read from its beginning. Each call for a position returns the same numbers; for several
        independent draws, use `rng_for`.

        Args:
            position: Index of the item within its stream, 0 or more.
        """
        key = (_POSITION, self.epoch, self.source_key, position, *self._again)
        return default_rng(SeedSequence(self.seed, spawn_key=key))

    def rng_for(self, purpose: str, position: int | None = None) -> Generator:
        """Return a new generator for one purpose, seeded from (seed, epoch, source, purpose) and the position, if any.

        Draws for different purposes are independent of each other, and of `rng` and `rng_at`. Without a position they
        hold for the whole source, including all of its sections, and after a resume.

        Args:
            purpose: A name for the draws, such as "crop".
            position: Index of the item within its stream, for draws of one item.

        Raises:
            TypeError: `purpose` is not a string.
            ValueError: `position` is negative.

        Example:
            >>> from stream_dataloader import StreamDataset, StreamDataLoader, get_stream_info
            >>> def open_noise(length):
            ...     info = get_stream_info()
            ...     gain = info.rng_for("gain").uniform(0.5, 2)  # one for each stream
            ...     for position in range(length):
            ...         yield gain * info.rng_for("noise", position).standard_normal()
            >>> loader = StreamDataLoader(StreamDataset([4, 2], open_noise, batch_size=2, time_steps=2, seed=1))
            >>> [tuple(batch.data.shape) for batch in loader]
            [(2, 2), (2, 2)]
        """
        if not isinstance(purpose, str):
            raise TypeError(f'purpose must be a string, such as "crop", and is {purpose!r}')
        if position is not None and position < 0:
            raise ValueError(f"position must be 0 or more, and is {position}")
        place = None if position is None else operator.index(position)
        drawn = repr((self.epoch, self.source_key, self.repeat, purpose, place)).encode()
        key = int.from_bytes(hashlib.blake2b(drawn, digest_size=16).digest(), "little")
        return default_rng(SeedSequence(self.seed, spawn_key=(_PURPOSE, key)))

    @property
    def global_seed(self) -> SeedSequence:
        """The seed of the global generators for the stream, with `seed_globals=True`."""
        key = (_GLOBALS, self.epoch, self.source_key, self.repeat, self.start)
        return SeedSequence(self.seed, spawn_key=key)

    @property
    def _again(self) -> tuple[int, ...]:
        return (self.repeat,) if self.repeat else ()


class _Current(threading.local):
    info: StreamInfo | None = None
    step: tuple[int, int] | None = None  # differs for each step that a reader of this process reads


#: The stream that runs in this thread; `run_as` sets it, and inner loops set it directly.
running = _Current()


def get_stream_info() -> StreamInfo | Any:
    """Return the `StreamInfo` of the running stream, or None outside of a stream.

    For type checkers the result is `StreamInfo | Any`, so that a stream need not check for None.

    It works in the factory and in the stream's iterator, in any worker, and in the background thread that opens streams
    early. It is modelled on `torch.utils.data.get_worker_info`.

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
    """Set the result of `get_stream_info` in this thread; return the value before."""
    before, running.info = running.info, info
    return before
