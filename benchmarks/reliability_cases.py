"""Random datasets, and how what is read of them is compared, for `reliability`.

Guarantee: a case follows from its random generator alone. Deterministic loaders are compared in every field of
every batch, bit for bit, with one that has no workers; others in every item, each of which must come once.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.streams import ArrayStream
from stream_dataloader.testing.resume import batch_key

Array = np.ndarray[Any, Any]
Source = tuple[int, int]  # index, number of items

MOST_BATCHES = 40  # of an epoch without end


# streams --------------------------------------------------------------------------------------------------------------


def numbers(source: Source, start: int = 0) -> Iterator[Array]:
    """Items that tell source, position and a random draw that depends on both; can be opened anywhere."""
    index, length = source
    for position in range(start, length):
        if (7 * index + position) % 5 == 0:
            time.sleep(1e-3 * (index % 3))
        info = get_stream_info()
        assert info is not None
        yield np.array([index, position, info.rng_at(position).integers(1 << 40)])


def forward(source: Source) -> Iterator[Array]:
    """The same, to be read forward only."""
    return numbers(source)


def named(source: Source) -> Iterator[dict[str, Any]]:
    """Items with a string among their leaves, which does not go through the ring."""
    for item in numbers(source):
        yield {"name": "-".join(map(str, item)), "of": torch.from_numpy(item).to(torch.bfloat16)}


def large(source: Source) -> Iterator[Array]:
    """Items of 300 KB, which torch's queue sends by descriptor."""
    for item in numbers(source):
        yield np.broadcast_to(item, (12_500, 3))


def ragged(source: Source) -> Iterator[Array]:
    """Windows that the stream cuts itself, of 1 to 3 steps."""
    for item in numbers(source):
        yield np.broadcast_to(item, (1 + int(item[2] % 3), 3))


def breaking(source: Source) -> Iterator[Array]:
    """Breaks now and then, to be skipped."""
    for item in numbers(source):
        if item[2] % 8 == 0:
            raise OSError("it broke")
        yield item


class Stateful:
    """A stream with a state of its own, a running sum."""

    def __init__(self, source: Source) -> None:
        self._source, self._position, self._sum = source, 0, 0

    def __iter__(self) -> Iterator[Array]:
        return self

    def __next__(self) -> Array:
        if self._position == self._source[1]:
            raise StopIteration
        self._position += 1
        self._sum += self._position * self._source[0]
        return np.array([self._source[0], self._position - 1, self._sum])

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"position": self._position, "sum": self._sum}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self._position, self._sum = state["position"], state["sum"]


STREAMS: dict[str, Callable[[Any], Iterable[Any]]] = {
    **{stream.__name__: stream for stream in (numbers, forward, named, large, ragged, breaking)},
    "stateful": Stateful,
    "rows": ArrayStream(),
}
for _factory in (numbers, large, breaking, Stateful):
    _factory.open_early = True  # type: ignore[attr-defined]  # some are opened early, others not


# cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One random dataset."""

    kind: str
    lengths: list[int] = field(repr=False)
    lanes: int
    options: dict[str, Any]
    collated: bool

    @classmethod
    def draw(cls, rng: random.Random, modes: Iterable[str], fewest_lanes: int = 1) -> Case:
        """Draw one."""
        kind, mode = rng.choice(list(STREAMS)), rng.choice(list(modes))
        lanes = rng.randint(fewest_lanes, 8)
        fewest = max(lanes, 2) if mode == "drop" else 1
        longest = rng.choice((3, 12, 40)) if kind != "large" else 4
        lengths = [rng.randint(0, longest) for _ in range(rng.randint(fewest, 30))]
        if mode == "cycle":
            lengths[0] = max(1, lengths[0])
        options = {
            "padding_mode": mode,
            "time_steps": None if kind == "ragged" else rng.randint(1, 5),
            "windows": "given" if kind == "ragged" else rng.choice(("aligned", "packed")),
            "shuffle": rng.random() < 0.5,
            "lookahead": rng.randint(0, 3),
            "on_error": "skip" if kind == "breaking" else "raise",
        }
        collated = rng.random() < 0.15
        exact = collated or mode in ("drop", "cycle") or (mode, kind) == ("data", "breaking")  # order says what is read
        options["deterministic"] = exact or rng.random() < 0.8
        return cls(kind, lengths, lanes, options, collated)

    def loader(self, num_workers: int, *, seed: int = 3, **options: Any) -> StreamDataLoader:
        """A loader of it."""
        if self.kind == "rows":
            table = np.arange(120, dtype=np.int32).reshape(40, 3)
            sources: list[Any] = [(table + index, 0, length) for index, length in enumerate(self.lengths)]
        else:
            sources = list(enumerate(self.lengths))
        if self.collated:
            options["collate_fn"] = list
        dataset = StreamDataset(sources, STREAMS[self.kind], self.lanes, seed=seed, **self.options)
        return StreamDataLoader(dataset, num_workers, **options)

    def expected(self, epoch: int) -> tuple[list[Any], list[int]]:
        """The batches, and the sources that are skipped, of a run without workers and without a break."""
        loader = self.loader(0)
        loader.set_epoch(epoch)
        return [self.key(batch) for batch in itertools.islice(loader, self.limit)], skipped(loader)

    def key(self, batch: Any) -> Any:
        """Return the part that must be the same in another run: the whole batch, or the items in it."""
        if self.options["deterministic"]:
            return batch_key(batch)
        items = [_item(batch.data, t, lane) for t, lane in batch.mask.nonzero().tolist()]
        names = zip(batch.source_index[batch.mask].tolist(), batch.position[batch.mask].tolist(), strict=True)
        return [(*name, repr(batch_key(item))) for name, item in zip(names, items, strict=True)]

    def compare(self, found: list[Any], expected: list[Any], about: str) -> None:
        """Raise an error if two runs differ; says where."""
        if not self.options["deterministic"]:
            found, expected = ([item for batch in run for item in batch] for run in (found, expected))
            counts = Counter(found)
            counts.subtract(expected)
            wrong = {item: count for item, count in counts.items() if count}
            assert not wrong, f"{about}: items too often or too seldom: {str(wrong)[:500]}"
            return
        for i, (one, other) in enumerate(itertools.zip_longest(found, expected)):
            if one != other:
                both = isinstance(one, dict) and isinstance(other, dict)
                names = [name for name in one if one[name] != other[name]] if both else ""
                raise AssertionError(f"{about}: {len(found)} batches of {len(expected)}; batch {i} differs: {names}")

    @property
    def limit(self) -> int | None:
        """Number of batches to compare; None for all."""
        return MOST_BATCHES if self.options["padding_mode"] == "cycle" else None


def _item(data: Any, t: int, lane: int) -> Any:
    return {name: leaf[t][lane] for name, leaf in data.items()} if isinstance(data, dict) else data[t][lane]


def skipped(loader: StreamDataLoader) -> list[int]:
    """The sources that a loader had to skip."""
    return sorted(failure.source_index for failure in loader.failures)


def random_options(rng: random.Random) -> dict[str, Any]:
    """Options of a loader with workers."""
    options: dict[str, Any] = {
        "prefetch_factor": rng.choice((None, 1, 2, 4)),
        "persistent_workers": rng.random() < 0.3,
    }
    if rng.random() < 0.02:
        options["multiprocessing_context"] = rng.choice(("spawn", "forkserver"))
    return options
