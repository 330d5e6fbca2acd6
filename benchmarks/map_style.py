"""Cost of map-style datasets: read as streams, against torch's own `DataLoader`, and drawn as indices.

- `streams`: items a second of `StreamDataset.from_map_style` with two workers, against torch's `DataLoader` with as
  many workers and a plain sequential batch sampler over the same dataset, the same number of items a batch. Items
  are (3, 64, 64) uint8 tensors that cost nothing.
- `indices`: indices a second of `LaneBatchSampler`, against torch's `BatchSampler(SequentialSampler)`: as the main
  process makes them, batch by batch, and with each index made into the `LaneIndex` that a worker hands to the dataset.

All contenders of a section take turns; see `interleaved`. Run it as
`python benchmarks/map_style.py [--quick] [--json PATH] [--only SECTION]`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from interleaved import Result, figure, ratio, take_turns
from program import Section, run
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from stream_dataloader import LaneBatchSampler, StreamDataLoader, StreamDataset

LEAST_OF_DATALOADER = 1.5
LEAST_OF_SAMPLER = 0.2


class Pictures(Dataset[torch.Tensor]):
    """Tensors (3, 64, 64) uint8, which are there already.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._some = torch.randint(0, 256, (64, 3, 64, 64), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._some[index % 64]


class PicturesAtOnce(Pictures):
    """The same, several by one call."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """The items of some indices."""
        return [self._some[index % 64] for index in indices]


def items_a_second(batches: Iterable[Any], items: int) -> float:
    """Read some batches of `items` each, the first few of which are not counted."""
    iterator = iter(batches)
    next(iterator)
    start = time.perf_counter()
    count = sum(1 for _ in iterator)
    return count * items / (time.perf_counter() - start)


def measure_streams(quick: bool) -> Iterator[Result]:
    """Items a second of two workers, against torch's own loader."""
    steps, batch_size = 16, 16
    for pictures in (Pictures, PicturesAtOnce):
        dataset = pictures(steps * batch_size * (200 if quick else 500))
        length = len(dataset) // (4 * batch_size)
        groups = [range(begin, begin + length) for begin in range(0, len(dataset), length)]

        def ours(dataset: Pictures = dataset, groups: list[range] = groups) -> float:
            streams = StreamDataset.from_map_style(dataset, groups, batch_size, time_steps=steps)
            # as many batches ahead as torch's loader has, where each of the workers is 2 batches ahead
            return items_a_second(StreamDataLoader(streams, 2, prefetch_factor=4), steps * batch_size)

        def theirs(dataset: Pictures = dataset) -> float:
            sampler = BatchSampler(SequentialSampler(dataset), steps * batch_size, drop_last=True)
            return items_a_second(DataLoader(dataset, batch_sampler=sampler, num_workers=2), steps * batch_size)

        how = "by __getitems__" if pictures is PicturesAtOnce else "one by one"
        rounds = take_turns({"ours": ours, "theirs": theirs}, 2 if quick else 9, how)
        section = f"streams: 2 workers, {steps} x {batch_size} items (3, 64, 64) uint8 a batch"
        yield figure(section, f"from_map_style, {how}", rounds["ours"], "1/s")
        yield figure(section, f"torch's DataLoader, {how}", rounds["theirs"], "1/s")
        yield ratio(section, f"ratio, {how}", rounds, "ours", "theirs", LEAST_OF_DATALOADER, at_most=False)


def indices_a_second(batches: Iterable[list[int]], use: Callable[[list[int]], object]) -> float:
    """Draw an epoch."""
    drawn = 0
    start = time.perf_counter()
    for batch in batches:
        use(batch)
        drawn += len(batch)
    return drawn / (time.perf_counter() - start)


def leave(_batch: list[int]) -> None:
    """Do nothing: the batch goes to a worker as it is."""


def look_at_each(batch: list[int]) -> None:
    """Do a worker's part: request each index."""
    deque(batch, maxlen=0)


def measure_indices(quick: bool) -> Iterator[Result]:
    """Indices a second, against torch's sampler."""
    # lanes, time steps, lengths of groups: episodes of a robot, and scenes of 40 frames, as in driving datasets
    episodes, scenes = [120, 300, 75, 505], [40]
    for lanes, steps, some in ((16, 16, episodes), (8, 1, episodes), (16, 16, scenes)):
        total = (200_000 if quick else 1_000_000) // (1 if steps > 1 else 4)
        lengths = list(itertools.islice(itertools.cycle(some), total * len(some) // sum(some)))

        def ours(
            use: Callable[[list[int]], object], lanes: int = lanes, steps: int = steps, lengths: list[int] = lengths
        ) -> float:
            count = sum(lengths) // (lanes * steps)
            options: dict[str, Any] = {"padding_mode": "cycle", "batches_per_epoch": count, "shuffle": True, "seed": 0}
            sampler = LaneBatchSampler(lanes, steps, lengths=lengths, **options)
            return indices_a_second(sampler, use)

        def theirs(size: int = lanes * steps, total: int = total) -> float:
            return indices_a_second(BatchSampler(SequentialSampler(range(total)), size, drop_last=False), leave)

        size = f"{steps} x {lanes} a batch, shuffled groups of {sum(some) // len(some)} items on average"
        rounds = take_turns(
            {"drawn": lambda: ours(leave), "made": lambda: ours(look_at_each), "theirs": theirs},
            2 if quick else 9,
            size,
        )
        section = f"indices: {size}"
        least = LEAST_OF_SAMPLER if steps > 1 and some is episodes else None
        yield figure(section, "LaneBatchSampler", rounds["drawn"], "1/s")
        yield figure(section, "the same, each made a LaneIndex", rounds["made"], "1/s")
        yield figure(section, "BatchSampler(SequentialSampler)", rounds["theirs"], "1/s")
        yield ratio(section, "ratio", rounds, "drawn", "theirs", least, at_most=False)
        yield ratio(section, "ratio, each made a LaneIndex", rounds, "made", "theirs", at_most=False)


SECTIONS: dict[str, Section] = {"streams": measure_streams, "indices": measure_indices}


if __name__ == "__main__":
    run(__doc__, SECTIONS)
