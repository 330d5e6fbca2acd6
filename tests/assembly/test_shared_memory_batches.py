"""Batches put together in shared memory: whose they are, what does not fit, where the memory comes from."""

import collections
import dataclasses
import gc
import multiprocessing
import os
import pathlib
import sys
import textwrap
import warnings

import helpers
import numpy as np
import pytest
import torch
from cases import keys
from helpers import START_METHODS, random_cases, soon
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from worker_streams import raising

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader.errors import ItemError

Pair = collections.namedtuple("Pair", "first second")


def in_shared_memory(array):
    """Whether an array or tensor lies in the loader's anonymous memory."""
    address = array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "memfd:stream_dataloader" in line
    return False


def count_up(length, size=4):
    return iter([np.full(size, 1000 * get_stream_info().source_index + i) for i in range(length)])


def loader_of(lengths=(50,) * 4, lanes=4, time_steps=2, workers=2, open_stream=count_up, **options):
    return StreamDataLoader(
        StreamDataset(lengths, open_stream, lanes, time_steps=time_steps, seed=0), workers, **options
    )


def plain(value):
    """Anything a loader may yield, as lists."""
    return map_leaves(value, lambda leaf: (str(leaf.dtype), leaf.tolist()) if hasattr(leaf, "tolist") else leaf)


#: By name: what a user keeps of batch `step`, and what must then stay in it.
KEPT = {
    "batch": lambda batch, step: (lambda kept=batch: kept.data.tolist(), rows_of(step)),
    "data": lambda batch, step: (batch.data.tolist, rows_of(step)),
    "view": lambda batch, step: (batch.data[1, 2:, 1].tolist, [2000 + 2 * step + 1]),
    "numpy": lambda batch, step: (batch.data.numpy()[1, ::2, 0].tolist, [2 * step + 1, 2000 + 2 * step + 1]),
    "mask": lambda batch, step: (batch.mask.all(0).tolist, [True] * 3),
    "position": lambda batch, step: (batch.position[:, 0].tolist, [2 * step, 2 * step + 1]),
    "unbound": lambda batch, step: (batch.data.unbind(1)[0].tolist, [[2 * step] * 4, [2 * step + 1] * 4]),
}


def rows_of(step):
    return [[[1000 * lane + 2 * step + t] * 4 for lane in range(3)] for t in range(2)]


class Holding(RuleBasedStateMachine):
    """A user who keeps some of what a loader yields, and drops it again: contents never change."""

    def __init__(self):
        super().__init__()
        self.held = []
        self.loader = loader_of((400,) * 3, 3, 2, persistent_workers=True)
        self.restart()

    @rule(how=st.sampled_from([*KEPT, None]), times=st.sampled_from([1, 1, 1, 30]))
    def take(self, how, times):
        for _ in range(times):
            if (batch := next(self.iterator, None)) is None:
                self.restart()
                return
            step, self.step = self.step, self.step + 1
            assert batch.data.tolist() == rows_of(step)
            if how is not None:
                self.held.append(KEPT[how](batch, step))

    @rule()
    def restart(self):
        self.iterator, self.step = iter(self.loader), 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data):
        del self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @rule()
    def drop_all(self):
        self.held.clear()
        self.take(None, 30)
        batch = next(self.iterator, None)
        if batch is not None:
            self.step += 1
            assert in_shared_memory(batch.data), "the ring is not used again"

    @invariant()
    def contents_never_change(self):
        for content, expected in self.held:
            assert content() == expected

    def teardown(self):
        self.held.clear()
        self.iterator.close()
        del self.iterator, self.loader
        gc.collect()


Holding.TestCase.settings = settings(random_cases(40, 3), stateful_step_count=30)
TestHolding = Holding.TestCase


def test_a_batch_outlives_its_loader_and_workers():
    kept = next(iter(loader_of())).data
    gc.collect()
    assert soon(lambda: not multiprocessing.active_children())
    assert kept[:, :, 0].tolist() == [[0, 1000, 2000, 3000], [1, 1001, 2001, 3001]]


def test_a_forked_process_that_ends_gives_back_nothing_of_the_parents():
    iterator = iter(loader_of((2000,) * 4))
    kept = next(iterator).data
    if not (pid := os.fork()):
        del kept
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    for batch in iterator:
        assert batch.data.data_ptr() != kept.data_ptr()
    assert kept[:, :, 0].tolist() == [[0, 1000, 2000, 3000], [1, 1001, 2001, 3001]]


def test_leaves_of_all_kinds_lie_side_by_side():
    def items(n):
        for i in range(n):
            yield {
                "bytes": torch.full((3, 5), i % 2, dtype=torch.uint8),
                "halves": torch.full((3, 5), i, dtype=torch.bfloat16),
                "flags": torch.full((3, 5), i % 2, dtype=torch.bool),
                "scalar": i,
                "empty": np.zeros((0, 3), np.float32),
                "nested": Pair(np.float64(i), (i, torch.tensor(i))),
            }

    batches = list(loader_of((7, 4, 9), lanes=3, open_stream=items))
    for batch, other in zip(batches, loader_of((7, 4, 9), lanes=3, open_stream=items, workers=0), strict=True):
        assert plain(batch.data) == plain(other.data)
    leaves = []
    map_leaves(batches[0].data, leaves.append)
    for leaf in leaves:
        assert leaf.data_ptr() % 64 == 0
        assert in_shared_memory(leaf) or leaf.numel() == 0
    for leaf in [*leaves, batches[0].mask, batches[0].source_index, batches[0].position, batches[0].is_first]:
        assert leaf.is_contiguous()
        assert leaf.shape[:2] == (2, 3)


@dataclasses.dataclass
class Varied:
    """Streams whose items fit the first one's layout, or do not, in all the ways there are."""

    seed: int
    alike: bool  # within a stream and between streams
    windowed: bool

    def __call__(self, source):
        index, length = source
        rng = np.random.default_rng(self.seed + (0 if self.alike else index))
        kind = rng.integers(8)
        for i in range(length):
            steps = (np.random.default_rng((self.seed, index, i)).integers(1, 5),) if self.windowed else ()
            whole = np.full((*steps, 2), 100 * index + i, np.int32)
            yield [
                whole,
                torch.from_numpy(whole).to(torch.bfloat16),
                {"z": whole, "a": torch.from_numpy(whole)},
                {"a": torch.from_numpy(whole), "name": [str(i)] * len(whole)},
                Pair(whole, whole[..., 0].astype("i2")),
                str(i),
                None if self.windowed else i,
                whole[..., :1],
            ][kind]


@pytest.mark.parametrize("collate", [True, False])
@random_cases(60, 4)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    lanes=st.integers(1, 4),
    windowed=st.booleans(),
    alike=st.booleans(),
    workers=st.integers(1, 3),
)
@pytest.mark.filterwarnings("ignore:num_workers is")
def test_the_transport_makes_no_difference(collate, seed, lengths, lanes, windowed, alike, workers):
    options = {"windows": "given"} if windowed else {"time_steps": 3}
    dataset = StreamDataset(list(enumerate(lengths)), Varied(seed, alike, windowed), lanes, fill_value=0, **options)

    def outcome(workers, messages):
        batches = []
        loader = helpers.loader_of(dataset, workers, collate_fn=list if collate else None, messages=messages)
        try:
            for batch in loader:
                if collate:
                    batches.append((plain(batch), map_leaves(batch, kind_of)))
                else:
                    batches.append(
                        [plain(field) for field in (batch.data, batch.source_index, batch.position, batch.mask)]
                    )
        except ItemError as error:
            batches.append((type(error), error.lane, error.source_index, error.position))
        return batches

    assert outcome(workers, True) == outcome(0, False) == outcome(workers, False)


def kind_of(leaf):
    return type(leaf).__name__, leaf.is_contiguous() if isinstance(leaf, torch.Tensor) else None


def test_collate_fn_gets_views_into_the_slot():
    def windows(n):
        for i in range(n):
            yield torch.full((3, 2), i) if get_stream_info().source_index else np.full((3, 2), i)

    for batch in loader_of((9, 9), 2, 3, collate_fn=list):
        assert all(in_shared_memory(window) and window.is_contiguous() for window in batch)
    assert batch[1][:, 0].tolist() == [1006, 1007, 1008]
    batches = list(loader_of((9, 9), 2, None, open_stream=windows, collate_fn=list))
    assert [type(window) for window in batches[0]] == [np.ndarray, torch.Tensor]
    assert all(in_shared_memory(window) for batch in batches[1:3] for window in batch)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"worker_method": "thread"}], ids=str)
def test_parts_and_whole_windows_of_one_loader_in_turn(options):
    loader = loader_of((9, 9), 2, 3, collate_fn=list, **options)
    for _ in range(2):
        batches = list(loader)
        assert [window[:, 0].tolist() for window in batches[1]] == [[3, 4, 5], [1003, 1004, 1005]]
        assert all(window.is_contiguous() for batch in batches for window in batch)
        parts = list(loader.parts())
        assert [part.data[:, 0, 0].tolist() for part in parts[2:4]] == [[3, 4, 5], [1003, 1004, 1005]]


@pytest.mark.parametrize("wrap", [np.asarray, lambda buffer: {"x": buffer, "name": "a"}], ids=["array", "dict"])
@pytest.mark.parametrize(
    "options", [{"messages": True}, {}, {"worker_method": "thread", "prefetch_factor": 5}], ids=str
)
def test_windows_for_a_collate_fn_may_be_one_buffer(wrap, options):
    def windows(n):
        buffer = np.zeros((2, 3))
        for i in range(60):
            buffer[:] = n * 100 + i
            yield wrap(buffer)

    def collate(windows):
        return [float((window["x"] if isinstance(window, dict) else window)[-1, -1]) for window in windows]

    loader = helpers.loader_of(StreamDataset([1, 2], windows, 2), 2, collate, **options)
    assert list(loader) == [[100 + i, 200 + i] for i in range(60)]


def test_a_ring_that_fits_nothing_is_replaced_with_the_next_epochs_workers():
    sizes = [3]
    loader = loader_of((9,) * 4, open_stream=lambda n: count_up(n, sizes[0]))
    assert in_shared_memory(next(iter(loader)).data)
    sizes[0] = 5
    assert not in_shared_memory(next(iter(loader)).data)
    assert in_shared_memory(next(iter(loader)).data)


SMALL_SHM = """
    import ctypes, multiprocessing, os, subprocess, sys, warnings, numpy as np
    from stream_dataloader import StreamDataLoader, StreamDataset

    def open_stream(n):
        rng = np.random.default_rng(0)
        for i in range(n):
            yield rng.integers(0, 255, (300, 400 + (i if n == 5 else 0)), np.uint8)  # those of n = 5 do not fit

    if __name__ == "__main__":
        warnings.simplefilter("ignore")
        allowed = os.geteuid() == 0 and ctypes.CDLL(None).unshare(0x20000) == 0  # a mount namespace of its own
        for how in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=1M", "tmpfs", "/dev/shm"]):
            allowed = allowed and subprocess.run(["mount", *how]).returncode == 0
        before = set(os.listdir("/dev/shm"))
        system = os.statvfs("/dev/shm")
        fitting, ragged = ([30] * 6, 4, {}), ([30, 5, 5], 1, {"collate_fn": list})
        multiprocessing.set_forkserver_preload(["stream_dataloader"])
        for lengths, time_steps, options in (fitting, ragged):
            dataset = StreamDataset(lengths, open_stream, 3, time_steps=time_steps, on_error="skip")
            kept = list(StreamDataLoader(dataset, 2, multiprocessing_context=sys.argv[1], **options))
            assert len(kept) >= 8, len(kept)
            if not options:
                new = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}  # of torch's queues
                assert new <= before, new
        assert not allowed or system.f_bavail * system.f_frsize <= 1 << 20
        print("read")
"""


@pytest.mark.parametrize("method", START_METHODS)
def test_dev_shm_may_be_as_small_as_it_likes(programs, method):
    done = programs(textwrap.dedent(SMALL_SHM), method)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_without_memfd_it_is_posix_shared_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    before = os.listdir("/dev/shm")
    batches = list(loader_of(multiprocessing_context="fork"))
    assert keys(batches) == keys(loader_of(workers=0))
    assert not in_shared_memory(batches[0].data)
    assert "/dev/shm" in pathlib.Path("/proc/self/maps").read_text()
    assert os.listdir("/dev/shm") == before, "it has no name"


@pytest.mark.parametrize("grown", [True, False])
def test_without_shared_memory_it_is_the_queue_with_one_warning(monkeypatch, grown, caplog):
    expected = keys(loader_of(workers=0))
    if grown:  # there is some, and not enough: ftruncate fails in the worker that lays out the slots
        no_room = raising(OSError, "no room")
        monkeypatch.setattr("stream_dataloader._engine.memory.shared_memory.SharedFile.grow", lambda *_: no_room())
    else:
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.setitem(sys.modules, "_posixshmem", None)
        # The newest file of small blocks lives as long as the process: that of this test must not.
        monkeypatch.setattr("stream_dataloader._engine.memory.shared_memory._newest", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = loader_of(multiprocessing_context="fork")
        for _ in range(2):
            assert [fields[:-1] for fields in keys(loader)] == [fields[:-1] for fields in expected]
    messages = [str(warning.message) for warning in caught]
    assert ["no shared memory" in message for message in messages if "multi-thr" not in message] == [True]
    assert ["sent through the message queue" in record.getMessage() for record in caplog.records] == [True]
