"""What tests of carried states share: streams of ones, which a state counts, and structures of states."""

import dataclasses
import io
import itertools
import typing

import torch

from stream_dataloader import merge_states
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
        self.first = {}  # where each lane's stream began, for `check_carried`

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


def check_carried(batch, carriers):
    """Check that what is carried knows as much of each lane's stream as was read of it; return the batch's items.

    Where a lane is gone, another one goes on in the middle of its stream, with `reset` set.
    """
    real = ~batch.is_padding
    counts = carriers.count(batch, real[..., None].float())
    for row, lane in enumerate(batch.lane.tolist()):
        if batch.reset[row]:
            carriers.first[lane] = int(batch.position[0, row])
        read = int(batch.position[:, row].max()) + 1 - carriers.first.get(lane, 0)
        if real[0, row]:
            assert counts[row][:2] == [[float(read)], read], "what is carried is another stream's, or nothing"
    return list(zip(batch.source_index[batch.mask].tolist(), batch.position[batch.mask].tolist(), strict=True))


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


def resumed_before_each_batch(make, use, count):
    """Read batches of which each comes from a loader and goes to a carrier that were made and loaded for it.

    Yields each batch, its carrier, and what `use(batch, carrier)` returned.
    """
    state = through_file([one.state_dict() for one in make(0)])
    for number in range(count):
        loader, carrier = make(number)
        loader.load_state_dict(state[0])
        carrier.load_state_dict(state[1])
        batches = iter(loader)
        batch = next(batches)
        found = use(batch, carrier)
        state = through_file([batch.state_dict(), carrier.state_dict()])
        del batches
        yield batch, carrier, found


def handed_over(make, use, before, after, steps=3):
    """Read some steps on as many ranks as `before`, and the rest on as many as `after`, all in this process.

    `make(rank=, world_size=)` makes a loader and a carrier. Yields for each step what `use(batch, carrier)` returned on
    each rank.
    """
    first, second = ([make(rank=rank, world_size=count) for rank in range(count)] for count in (before, after))

    def read(ranks):
        for batches in zip(*(loader for loader, _ in ranks), strict=True):
            yield [use(batch, carrier) for batch, (_, carrier) in zip(batches, ranks, strict=True)]

    yield from itertools.islice(read(first), steps)
    states = merge_states([loader.state_dict() for loader, _ in first])
    carried = merge_states(reversed([through_file(carrier.state_dict()) for _, carrier in first]))
    for loader, carrier in second:
        loader.load_state_dict(states)
        carrier.load_state_dict(carried)
    yield from read(second)
