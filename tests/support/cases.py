"""Random cases, and how a batch is compared with the serial model."""

import time
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from serial_model import serial_batches

from stream_dataloader import StreamDataset, get_stream_info
from stream_dataloader._schedule.order import Order


@dataclass
class Case:
    """One dataset, small enough to be replayed by the model."""

    lengths: list = field(default_factory=lambda: [3, 1, 2])
    lanes: int = 2
    time_steps: int = 2
    windows: str = "aligned"
    padding_mode: str = "zeros"
    lookahead: int = 1
    shuffle: bool = False
    seed: int = 0
    jitter: bool = False
    open_early: bool | None = None  # as `Counting` declares it
    mark_ends: bool = False
    broken: tuple = ()  # sources that raise behind their last item

    def dataset(self, **options):
        given = {
            "open_stream": Counting(self.jitter),
            "batch_size": self.lanes,
            "padding_mode": self.padding_mode,
            "seed": self.seed,
            "time_steps": self.time_steps,
            "windows": self.windows,
            "shuffle": self.shuffle,
            "lookahead": self.lookahead,
            "open_early": self.open_early,
            "mark_ends": self.mark_ends,
        }
        return StreamDataset(list(enumerate(self.lengths)), **(given | options))

    def expected(self, dataset, epoch=0):
        """What the model says, batch after batch."""
        orders = {}

        def source_of(grant):
            """Of first passes: with `"cycle"` each pass is an epoch, with `"data"` it is the same again."""
            turn, place = divmod(grant, len(self.lengths))
            number = epoch + turn if self.padding_mode == "cycle" else epoch
            if number not in orders:
                orders[number] = Order(dataset.rules, number, dataset.lengths)
            return orders[number][place].source

        return serial_batches(
            self.lengths,
            source_of,
            self.lanes,
            self.time_steps,
            self.windows,
            self.padding_mode,
            self.lookahead,
            (lambda source: source not in self.broken) if self.mark_ends else None,
        )


@dataclass
class Counting:
    """Streams whose items tell source, position and a random draw that depends on both."""

    jitter: bool = False
    open_early = True

    def __call__(self, source):
        index, length = source
        wait = np.random.default_rng(index)
        for position in range(length):
            if self.jitter:
                time.sleep(wait.uniform(0, 0.003))
            info = get_stream_info()
            assert info.source_index == index
            yield np.array([index, position, info.rng_at(position).integers(1 << 20)])


def cases(
    max_streams=30, max_length=12, max_lanes=9, modes=("zeros", "data", "drop"), min_streams=1, min_lanes=1, lookahead=0
):
    """Random cases; `lookahead`: the least."""

    def build(lengths, mode, lanes, **rest):
        return Case(
            lengths=lengths, lanes=min(lanes, len(lengths)) if mode == "drop" else lanes, padding_mode=mode, **rest
        )

    return st.builds(
        build,
        lengths=st.lists(st.integers(0, max_length), min_size=min_streams, max_size=max_streams),
        lanes=st.integers(min_lanes, max_lanes),
        mode=st.sampled_from(modes),
        time_steps=st.integers(1, 5),
        windows=st.sampled_from(["aligned", "packed"]),
        lookahead=st.integers(lookahead, 3),
        shuffle=st.booleans(),
        seed=st.integers(0, 1 << 40),
        open_early=st.sampled_from([None, True, False]),
        mark_ends=st.booleans(),
    )


def cells(batch):
    """A batch as the model writes it."""
    told = [batch.source, batch.position, batch.mask] + ([] if batch.is_last is None else [batch.is_last])
    return [
        [cell if cell[0] >= 0 else None for cell in zip(*lane, strict=True)]
        for lane in zip(*[field.T.tolist() for field in told], strict=True)
    ]


def check_fields(batch):
    """All fields of a batch agree with each other, and with what the streams wrote into the items."""
    real = batch.source >= 0
    assert (real == (batch.position >= 0)).all()
    assert not (batch.mask & ~real).any()
    assert (batch.data[..., 0][real] == batch.source[real]).all()
    assert (batch.data[..., 1][real] == batch.position[real]).all()
    assert (batch.data[~real] == 0).all()
    assert (batch.is_start == (batch.position == 0)).all()
    assert (batch.reset == batch.is_start[0]).all()
    if batch.is_last is not None:
        assert not (batch.is_last & ~real).any()


def key(batch, worker_id=False):
    """Every field but `worker_id`, to be compared between runs; `is_last` if it is there."""
    fields = [batch.data, batch.reset, batch.is_start, batch.mask, batch.source, batch.position, batch.lane]
    fields += [] if batch.is_last is None else [batch.is_last]
    return [f.tolist() for f in fields] + [batch.step, batch.epoch] + ([batch.worker_id.tolist()] if worker_id else [])


def keys(batches):
    """The keys of batches, or of a loader's next epoch."""
    return [key(batch) for batch in batches]
