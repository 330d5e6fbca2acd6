"""What tests of carried states share: streams of ones, which a state counts, and structures of states."""

import dataclasses
import io
import typing

import torch

from stream_dataloader.recurrent import LaneCache, LaneMemory, RecurrentState


def ones(length, dtype=torch.float32):
    """A stream of ones: the sum of its items so far is its position and one."""
    return (torch.ones(1, dtype=dtype) for _ in range(length))


def counted(batch, count):
    """A state `(B, 1)` that sums up each stream's items."""
    return batch.data.sum(0) + (0 if count is None else count)


class Carriers:
    """One of each kind that trainers save."""

    def __init__(self):
        self.state, self.memory, self.cache = RecurrentState(batch_dim=0), LaneMemory(), LaneCache(3)
        self.all = [self.state, self.memory, self.cache]

    def count(self, batch, data):
        """For each lane what all three know of its stream: the sum, the number of items, how many steps are seen."""
        before = self.state.before(batch)
        state = data.sum(0) + (0 if before is None else before)
        self.state.after(batch, state)
        for t, seen in self.memory.steps(batch):
            for items in seen:
                if items is not None:
                    items.append(t)
        _, mask = self.cache.before(batch)
        self.cache.after(batch, data)
        items = [len(self.memory[lane]) for lane in batch.lane.tolist()]
        return [list(lane) for lane in zip(state.tolist(), items, mask.sum((1, 2)).tolist(), strict=True)]


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: typing.Any


class Named(typing.NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
