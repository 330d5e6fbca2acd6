"""Every kind of loader there is, small enough to be read again and again."""

import functools

import numpy as np

from stream_dataloader import LaneBatchSampler, Sections, StreamDataLoader, StreamDataset, interleave, side_by_side

LENGTHS = [5, 0, 3, 9, 1, 7, 2, 6, 4, 8, 3, 5]
GROUPS = [list(range(5)), list(range(5, 12)), list(range(12, 15)), list(range(15, 24)), list(range(24, 30))]


class Counted:
    """A stream with a state of its own."""

    def __init__(self, length):
        self._length, self._next = length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._next == self._length:
            raise StopIteration
        self._next += 1
        return self._next - 1

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]


def windows(length):
    for begin in range(0, length, 2):
        yield np.arange(begin, min(begin + 2, length))


def dataset(open_stream=range, sources=LENGTHS, **options):
    defaults = {"batch_size": 4, "time_steps": 2, "shuffle": True, "seed": 3}
    return StreamDataset(sources, open_stream, **(defaults | options))


known = functools.partial(dataset, lengths=LENGTHS)


def mixed(exhausted):
    halves = [dataset(sources=LENGTHS[:7]), dataset(sources=LENGTHS[7:])]
    return interleave(halves, weights=[1, 2], exhausted=exhausted, seed=5)


def endless(sources=LENGTHS):
    return dataset(sources=sources, padding_mode="cycle")


def sampler(**options):
    return LaneBatchSampler(3, 2, groups=GROUPS, shuffle=True, seed=7, **options)


#: How each kind of loader is built, with a loader's options.
KINDS = {
    "aligned": lambda **way: StreamDataLoader(dataset(), **way),
    "packed": lambda **way: StreamDataLoader(dataset(windows="packed"), **way),
    "windows of the stream's own": lambda **way: StreamDataLoader(
        dataset(windows, time_steps=None, windows="given"), **way
    ),
    "no reservations": lambda **way: StreamDataLoader(dataset(lookahead=0), **way),
    "data": lambda **way: StreamDataLoader(dataset(padding_mode="data", lookahead=2), **way),
    "drop": lambda **way: StreamDataLoader(dataset(padding_mode="drop"), **way),
    "cycle": lambda **way: StreamDataLoader(endless(), **way),
    "in mid-epoch of n batches": lambda **way: StreamDataLoader(endless(), **way, batches_per_epoch=3),
    "between epochs of n batches": lambda **way: StreamDataLoader(endless(), **way, batches_per_epoch=4),
    "two groups": lambda **way: StreamDataLoader(dataset(), **way, virtual_ranks=2),
    "known lengths": lambda **way: StreamDataLoader(known(schedule="balanced"), **way),
    "known lengths, two groups": lambda **way: StreamDataLoader(known(), **way, virtual_ranks=2),
    "streams with states": lambda **way: StreamDataLoader(dataset(Counted), **way),
    "sections": lambda **way: StreamDataLoader(dataset(sections=Sections(3, jitter=True, lengths=LENGTHS)), **way),
    "mixed, dropped": lambda **way: StreamDataLoader(mixed("leave_out"), **way),
    "mixed, repeated": lambda **way: StreamDataLoader(mixed("repeat"), **way),
    "side by side": lambda **way: side_by_side([(dataset(), 2), (endless(LENGTHS[3:]), 2)], **way),
    "sampler": lambda **_: sampler(),
    "sampler in mid-epoch of n batches": lambda **_: sampler(padding_mode="cycle", batches_per_epoch=3),
    "sampler between epochs of n batches": lambda **_: sampler(padding_mode="cycle", batches_per_epoch=4),
}


def plain(batch):
    if isinstance(batch, list):
        return [[int(index), index.lane, index.t, index.is_first, index.mask] for index in batch]
    fields = (batch.data, batch.source_index, batch.position, batch.mask, batch.is_first, batch.stream_seed)
    return [field.tolist() for field in fields]
