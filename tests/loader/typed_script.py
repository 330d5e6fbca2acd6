"""A user's script, for type checkers: what a loader yields is known, subclasses included. See `test_types.py`."""

from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import assert_type

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset, get_stream_info

dataset = StreamDataset([3, 4], range, batch_size=2, time_steps=2)


def stack(windows: list[Any]) -> torch.Tensor:
    return torch.stack(windows)


for batch in StreamDataLoader(dataset):
    assert_type(batch, StreamBatch)
for batch in StreamDataLoader(dataset, 0, None):
    assert_type(batch, StreamBatch)
for stacked in StreamDataLoader(dataset, 0, stack):
    assert_type(stacked, torch.Tensor)
for stacked in StreamDataLoader(dataset, collate_fn=stack).cpu():
    assert_type(stacked, torch.Tensor)
for part in StreamDataLoader(dataset, collate_fn=stack).parts():
    assert_type(part, StreamBatch)
loader = StreamDataLoader(dataset, num_workers=0, pin_memory=False)
assert_type(loader, StreamDataLoader[StreamBatch])
assert_type(next(iter(loader)), StreamBatch)


class VideoLoader(StreamDataLoader):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(StreamDataset(lengths, range, batch_size=2, time_steps=2), num_workers=0)


for batch in VideoLoader([3, 4]).to("cpu"):
    assert_type(batch, StreamBatch)
assert_type(VideoLoader([1]).cpu(), VideoLoader)


class StackedLoader(StreamDataLoader[torch.Tensor]):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(StreamDataset(lengths, range, batch_size=2, time_steps=2), collate_fn=stack)


for stacked in StackedLoader([3, 4]):
    assert_type(stacked, torch.Tensor)


class UntypedLoader(StreamDataLoader):
    def __init__(self, lengths):  # type: ignore[no-untyped-def]
        super().__init__(StreamDataset(lengths, range, batch_size=2, time_steps=2))


def train(batches: StreamDataLoader, anything: StreamDataLoader[Any]) -> None:
    for batch, other in zip(batches, anything, strict=True):
        assert_type(batch, StreamBatch)
        assert batch.data is not other.whatever


train(loader, StackedLoader([3]))
train(VideoLoader([3]), UntypedLoader([3]))  # type: ignore[no-untyped-call]
wrong: StreamDataLoader[torch.Tensor] = StreamDataLoader(dataset, collate_fn=len)  # type: ignore[arg-type]


def open_noise(length: int) -> Iterator[float]:
    info = get_stream_info()
    for position in range(length):
        yield info.rng_at(position).standard_normal()


StreamDataLoader(dataset, batch_size=4)  # type: ignore[arg-type]
