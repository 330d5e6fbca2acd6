"""Members side by side are read by one `StreamDataLoader`: what a loader offers holds for all of its lanes."""

import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset, WorkerDeathError, merge_states, side_by_side, split_state
from stream_dataloader._assembly.regroup import Regrouper

LENGTHS = [9, 4, 6, 3, 8, 12, 15, 2], [30, 20, 25, 30], [2, 5, 1, 4]


def counting(length, start=0):
    for i in range(start, length):
        yield np.full(3, i, np.float32)


def datasets(mode="zeros", **options):
    modes = mode, "zeros", "cycle"
    return [
        StreamDataset(own, counting, 2, mode, time_steps=2, seed=number, fill_value=-number, **options)
        for number, (own, mode) in enumerate(zip(LENGTHS, modes, strict=True))
    ]


def loader(num_workers=0, mode="zeros", ends_with="longest", **options):
    return side_by_side([(own, 2) for own in datasets(mode)], num_workers, ends_with=ends_with, **options)


def windows_of(found):
    return [batch.data.tolist() for batch in found]


def test_it_is_a_loader_with_stats_and_a_progress_bar(monkeypatch):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread of tqdm's
    found = loader()
    assert isinstance(found, StreamDataLoader)
    batches = list(found.progress(disable=True))
    stats = found.stats()
    assert stats.batches == len(batches)
    assert stats.items == sum(int((batch.source >= 0).sum()) for batch in batches)
    assert stats.cells == len(batches) * 2 * 6
    assert stats.setup.lanes == 6
    assert len(stats.workers) == 3  # one of each member


@pytest.mark.parametrize(
    "options", [{}, {"transport": "queue"}, {"worker_method": "thread"}, {"threads_per_worker": 2}], ids=str
)
@pytest.mark.parametrize("mode", ["zeros", "drop"])
@pytest.mark.parametrize("num_workers", [3, [1, 0, 2]])
def test_a_member_that_has_ended_is_padded_whoever_reads_it(options, mode, num_workers):
    assert windows_of(loader(num_workers, mode, **options)) == windows_of(loader(mode=mode))


@pytest.mark.parametrize("num_workers", [0, 3])
def test_parts_are_each_workers_lanes(num_workers):
    whole, parts = loader(num_workers), list(loader(num_workers).parts())
    for batch in whole:
        own = [part for part in parts if part.step == batch.step]
        assert [part.worker for part in own] == [number for number in range(3) if number in {p.worker for p in own}]
        for part in own:
            assert torch.equal(part.data, batch.data[:, part.lane])
            assert torch.equal(part.member, batch.member[part.lane])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_takes_the_windows_of_all_lanes(num_workers):
    found = loader(num_workers, collate_fn=lambda windows: torch.stack(windows, 1))
    assert [batch.tolist() for batch in found] == windows_of(loader())


@pytest.mark.parametrize("num_workers", [0, 3])
def test_batches_are_put_together_in_place(num_workers, monkeypatch):
    monkeypatch.delattr(Regrouper, "_column")  # what puts readers' windows side by side, if they lie elsewhere
    found = loader(num_workers, ends_with="first")
    for batch in found:
        assert batch.data.shape == (2, 6, 3)
    assert found.stats().copies == 0


class Deadly:
    """Kills its worker at an item of a source: once, or whenever it is read."""

    def __init__(self, path, source, *, always):
        self.path, self.source, self.always = Path(path), source, always

    def __call__(self, length, start=0):
        for i in range(start, length):
            if length == self.source and i == 3 and (self.always or not self.path.exists()):
                self.path.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield np.full(3, i, np.float32)


def deadly(path, *, always, **options):
    first, _, last = datasets(on_error="skip")
    killer = StreamDataset(
        LENGTHS[1], Deadly(path, 25, always=always), 2, time_steps=2, seed=1, fill_value=-1, on_error="skip"
    )
    return side_by_side([(first, 2), (killer, 2), (last, 2)], 3, ends_with="longest", **options)


def test_all_members_continue_after_a_worker_of_one_died(tmp_path):
    assert windows_of(deadly(tmp_path / "died", always=False, max_restarts=1)) == windows_of(loader())
    (tmp_path / "died").unlink()
    with pytest.raises(WorkerDeathError) as death:
        list(deadly(tmp_path / "died", always=False))
    assert death.value.member == 1


@pytest.mark.filterwarnings("ignore:skipped")
def test_a_source_that_kills_its_worker_is_skipped_in_its_own_member(tmp_path):
    found = deadly(tmp_path / "died", always=True, max_restarts=3)
    batches = list(found)
    assert [(error.source_index, error.position) for error in found.failures] == [(2, 2)]
    read = {m: {int(s) for b in batches for s in b.source[:, b.member == m].flatten() if s >= 0} for m in range(2)}
    assert read == {0: set(range(8)), 1: set(range(4))}


def test_a_copy_goes_on_where_the_loader_stands():
    found, other = loader(ends_with="first"), loader(ends_with="first")
    for own in (found, other):
        iterator = iter(own)
        for _ in range(3):
            next(iterator)
    copied = pickle.loads(pickle.dumps(found))
    assert found.state_dict()["step"] == 3  # it is still being read
    assert windows_of(copied) == windows_of(other)
    assert windows_of(pickle.loads(pickle.dumps(copied))) == windows_of(other)


def test_a_state_of_all_ranks_is_dealt_to_others():
    def rank(number, world_size):
        members = [
            (StreamDataset(own, counting, 4, time_steps=2, seed=0, lengths=own), 4 // world_size) for own in LENGTHS[:2]
        ]
        return side_by_side(members, ends_with="longest", rank=number, world_size=world_size, groups=2)

    whole = rank(0, 1)
    expected = windows_of(whole)
    ranks = [rank(0, 2), rank(1, 2)]
    for own in ranks:
        iterator = iter(own)
        for _ in range(3):
            next(iterator)
    merged = merge_states([own.state_dict() for own in ranks])
    whole.load_state_dict(merged)
    assert windows_of(whole) == expected[3:]
    for number, state in enumerate(split_state(merged, 2)):
        other = rank(number, 2)
        other.load_state_dict(state)
        assert windows_of(other) == windows_of(ranks[number])[3:] or other.epoch
