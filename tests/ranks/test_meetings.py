"""Ranks that meet although one is new, late, out of step or slow; and the end of the rank that keeps the store."""

import contextlib
import gc
import re
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # a process group that needs no network
from cases import Case
from helpers import PATIENCE, ROOT
from rank_processes import RankProcesses, free_port

from stream_dataloader import StreamDataLoader
from stream_dataloader._engine.ranks.rendezvous import prefix_of
from stream_dataloader._engine.ranks.store import StoreConnection, _named
from stream_dataloader.errors import RankError

LENGTHS = [9, 4, 6, 3]


@pytest.fixture(scope="module")
def two():
    with RankProcesses(2, killed=True) as processes:
        yield processes


_kept = []  # in a rank's process


def keep(rank):
    _kept.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _kept[0].port


@pytest.fixture(scope="module")
def agent(two):
    """The port of a store that outlives what ranks start and end; one of their processes plays the agent."""
    return two.run(1, keep)[0]


def start(rank, port, prefix="", keeps=False):
    """torch.distributed with a store at a port, as a new process would have it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    store = dist.TCPStore("127.0.0.1", port, is_master=keeps, wait_for_workers=False)
    store = dist.PrefixStore(prefix, store)
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)


def steps_or_error(loader):
    try:
        return len(list(loader))
    except RankError as error:
        return str(error)


def loader_for(lengths=LENGTHS, known=False, timeout=PATIENCE, **options):
    dataset = Case(lengths, lanes=1, time_steps=1, **options).dataset(**({"lengths": lengths} if known else {}))
    return StreamDataLoader(dataset, timeout=timeout)


def run(rank, port, prefix, who, known):
    """What ranks read that are started on a store that may have seen others; `who` does not come alone."""
    start(rank, port, prefix)
    if rank not in who:
        return None
    if len(who) == 1:
        return steps_or_error(loader_for(known=known, timeout=0.2))
    return [len(list(loader)) for loader in (loader_for(known=known), loader_for([5, 5], known))]


@pytest.mark.parametrize("known", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_that_are_started_again_on_the_same_store_meet(two, agent, known):
    for who in ([0], [0, 1], [1], [0], [0, 1], [0, 1]):
        found = two.run(2, run, agent, f"again {known}", who, known)
        if len(who) == 1:
            assert f"rank {1 - who[0]} did not begin the epoch" in found[who[0]]
        else:
            assert found[0] == found[1]
            assert found[0][1] == 5


def out_of_step(rank, port):
    """Rank 0 begins another epoch than rank 1; and what both read afterwards."""
    start(rank, port, "out of step")
    train, other, later = loader_for(), loader_for([2, 2]), loader_for([7, 1])
    list(train)
    seen = steps_or_error(train if rank else other)
    return seen, steps_or_error(later), steps_or_error(later)


def test_ranks_that_begin_different_epochs_are_told_and_go_on(two, agent):
    for seen, *later in two.run(2, out_of_step, agent):
        assert re.match("rank 1 has (epoch 1|fingerprint '.*'), and rank 0 (0|'.*'); build", seen)
        assert "as often, in the same order" in seen
        assert later == [7, 7]


def alone(rank, waits):
    return steps_or_error(loader_for(timeout=0.5)) if rank == waits else None


def together(rank, port=None):
    if port:
        start(rank, port, "missed")
    loader = loader_for([7, 1])
    return steps_or_error(loader), steps_or_error(loader)


def test_an_epoch_that_one_rank_misses_does_not_disturb_later_ones(two, agent):
    assert two.run(2, together, agent) == [(7, 7)] * 2
    for waits in (0, 1):
        found = two.run(2, alone, waits)
        assert f"rank {1 - waits} did not begin the epoch within 0.5 s" in found[waits]
        assert two.run(2, together) == [(7, 7)] * 2


def in_threads(rank, port):
    """Epochs of two loaders, begun at the same time by two threads of each rank, in no order."""
    start(rank, port, "threads")
    found = {}

    def read(lengths):
        loader = loader_for(lengths)
        found[len(lengths)] = [len(list(loader)) for _ in range(5)]

    threads = [threading.Thread(target=read, args=(lengths,)) for lengths in ([6, 3], [4, 2, 5])]
    for thread in threads[:: 1 - 2 * rank]:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    return found


def test_epochs_of_several_threads_find_their_own(two, agent):
    assert two.run(2, in_threads, agent) == [{2: [6] * 5, 3: [9] * 5}] * 2


def slowed(method):
    def slow(*args, **options):
        time.sleep(0.05)
        return method(*args, **options)

    return slow


def to_the_end(rank, port, options, lengths, known):
    """Steps of the last epoch; rank 0 keeps the store, which ends when it does, and rank 1 comes late to all."""
    start(rank, port, keeps=rank == 0)
    with contextlib.ExitStack() as patches:
        for name in ("put", "put_first", "count", "has", "text", "wait") if rank else ():
            slow = slowed(getattr(StoreConnection, name))
            patches.enter_context(mock.patch.object(StoreConnection, name, slow))
        found = steps_or_error(loader_for(lengths, known, **options))
    dist.destroy_process_group()
    gc.collect()
    return found


@pytest.mark.parametrize("known", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("mode", "lengths", "steps"), [("drop", [3, 9], 3), ("zeros", [9, 3], 9)])
def test_who_keeps_the_store_stays_until_the_others_have_read_the_end(two, mode, lengths, steps, known):
    assert two.run(2, to_the_end, free_port(), {"padding_mode": mode}, lengths, known) == [steps] * 2


@pytest.mark.slow
def test_a_program_that_ends_within_an_epoch_ends_well(agent):
    script = ROOT / "tests" / "trainers" / "rank_ends_at_once.py"
    places = [(f"ends {pair}", str(rank)) for pair in range(3) for rank in range(2)]
    commands = [[sys.executable, script, str(agent), *place] for place in places]
    programs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    ends = [(program.communicate(timeout=PATIENCE)[1], program.returncode) for program in programs]
    assert ends == [("", 0)] * len(programs)


def test_many_silent_ranks_and_attempts_of_an_agent_are_told_apart(monkeypatch):
    assert _named(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    for groups, attempt in (("1", "3"), ("2", "0")):  # agents of several hosts count by themselves
        monkeypatch.setenv("GROUP_WORLD_SIZE", groups)
        assert prefix_of("all") == f"stream_dataloader/all/{attempt}"
