"""Workers that are tasks on the nodes of a Ray cluster: the same batches, whatever dies meanwhile."""

import contextlib
import gc
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import Counter

import numpy as np
import pytest
from cases import cases, key, keys
from helpers import PATIENCE, ROOT, random_cases, run_program, soon
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info, side_by_side, stores
from stream_dataloader._engine.remote import pool
from stream_dataloader._engine.remote.frames import Connection
from stream_dataloader.errors import (
    ItemError,
    OpenError,
    StreamError,
    WorkerDeathError,
    WorkerError,
    WorkerTimeoutError,
)
from stream_dataloader.stores import StoreError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray")

LENGTHS = [14, 0, 19, 12, 2, 17, 1, 13, 5, 18, 16, 9] * 3


def items(n):
    return (np.full(4, i) for i in range(n))


def dataset(open_stream=items, lengths=LENGTHS, known=True, **options):
    given = {"batch_size": 5, "time_steps": 2, "shuffle": True, "seed": 4, "lengths": lengths if known else None}
    return StreamDataset(lengths, open_stream, **(given | options))


#: Ray gives the process of a task to the next one, as each process takes seconds to start.
REUSED = {"max_calls": 0}


def remote(data, num_workers=3, ray_remote_args=REUSED, **options):
    return StreamDataLoader(data, num_workers, worker_method="ray", ray_remote_args=ray_remote_args, **options)


@pytest.fixture(scope="module")
def cluster():
    """Three nodes of this machine. Workers inherit the path."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent), before])
    node = {"num_cpus": 6, "object_store_memory": 100 << 20}
    found = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        for _ in range(2):
            found.add_node(**node)
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        yield found
    finally:
        ray.shutdown()
        found.shutdown()
        os.environ["PYTHONPATH"] = before


def left_behind():
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("stream-")]
    ends = [one for one in gc.get_objects() if type(one) is Connection and one.is_open]
    return names + ends


@pytest.fixture(autouse=True)
def _no_leaks(cluster):
    """In place of the usual one, as Ray's own threads and sockets come and go."""
    yield
    gc.collect()
    assert soon(lambda: not left_behind(), 20), left_behind()


@random_cases(60, 15)
@given(
    case=cases(min_lanes=2, lengths=True),
    workers=st.integers(1, 4),
    resumed=st.integers(0, 4),
    cut=st.integers(1, 5),
    data=st.data(),
)
def test_the_batches_are_those_of_one_process_also_resumed_elsewhere(case, workers, resumed, cut, data):
    methods = ["ray", "ray", "thread"]
    whole = keys(StreamDataLoader(case.dataset()))
    loader = remote(case.dataset(), min(workers, case.lanes))
    assert keys(loader) == whole
    left = remote(case.dataset(), min(workers, case.lanes))
    head = []
    for batch in left:
        head.append(key(batch))
        if len(head) == cut:
            break
    assert head == whole[:cut]
    state = left.state_dict()
    if len(head) == len(whole):
        return
    on = {"worker_method": data.draw(st.sampled_from(methods))} if resumed else {}
    other = StreamDataLoader(case.dataset(), min(resumed, case.lanes), **on)
    other.load_state_dict(state)
    assert keys(other) == whole[cut:]


@pytest.mark.parametrize("known", [True, False])
def test_kept_workers_read_epoch_after_epoch(known):
    alone = StreamDataLoader(dataset(known=known))
    expected = [keys(alone) for _ in range(3)]
    loader, pids = remote(dataset(known=known), 2, persistent_workers=True), set()
    for epoch in range(3):
        assert keys(loader) == expected[epoch]
        pids.add(tuple(place.pid for place in loader._starter.pool.workers.mail.processes.values()))
    assert len(pids) == 1
    loader._stop_workers()


@pytest.mark.parametrize("known", [True, False])
def test_an_epoch_that_was_left_goes_on(known):
    loader, alone = remote(dataset(known=known)), StreamDataLoader(dataset(known=known))
    for one in (loader, alone):
        for batch in one:
            if batch.batch_index == 4:
                break
    assert keys(loader) == keys(alone)
    assert loader.stats().items == alone.stats().items


def test_parts_and_collated_windows_are_those_of_processes():
    def windows(lanes):
        return [lane.tolist() for lane in lanes]

    processes, tasks = StreamDataLoader(dataset(), 2), remote(dataset(), 2)
    assert [(p.worker_id.tolist(), key(p)) for p in tasks.parts()] == [
        (p.worker_id.tolist(), key(p)) for p in processes.parts()
    ]
    assert list(remote(dataset(), 2, collate_fn=windows)) == list(StreamDataLoader(dataset(), collate_fn=windows))


def test_datasets_side_by_side_are_read_by_workers_too():
    def loader(*workers, **options):
        members = [(dataset(batch_size=2), 2), (dataset(known=False, batch_size=2, seed=5), 2)]
        return side_by_side([(data, lanes) for data, lanes in members], *workers, **options)

    assert keys(loader(2, worker_method="ray")) == keys(loader())


def test_without_order_each_item_is_read_once():
    loader = remote(dataset(known=False, deterministic=False), 3)
    read = Counter(
        pair
        for batch in loader
        for pair in zip(batch.source_index[batch.mask].tolist(), batch.position[batch.mask].tolist(), strict=True)
    )
    assert read == Counter((index, position) for index, length in enumerate(LENGTHS) for position in range(length))


def test_workers_tell_what_they_did():
    loader = remote(dataset(known=False), 2)
    keys(loader)
    stats = loader.stats()
    assert [worker.items > 0 and worker.opened > 0 and worker.reading_seconds > 0 for worker in stats.workers] == [
        True
    ] * 2
    assert sum(worker.items for worker in stats.workers) == stats.items
    assert {event.kind for event in stats.events} >= {"batch", "step"}


@pytest.mark.parametrize("known", [True, False])
def test_a_killed_worker_costs_nothing_but_time(known):
    expected, loader, found = (
        keys(StreamDataLoader(dataset(known=known))),
        remote(dataset(known=known), max_restarts=4),
        [],
    )
    for batch in loader:
        found.append(key(batch))
        if batch.batch_index in (3, 11):
            workers = loader._starter.pool.workers
            os.kill(workers.mail.processes[batch.batch_index % 3].pid, signal.SIGKILL)
    assert found == expected
    assert loader.stats().restarts in (1, 2)  # all may have been read before


def slow(n):
    for i in range(n):
        time.sleep(0.002)
        yield np.full(4, i)


@pytest.mark.parametrize("known", [True, False])
def test_the_loss_of_a_node_costs_nothing_but_time(cluster, known):
    node = cluster.add_node(num_cpus=6, object_store_memory=100 << 20, resources={"lost": 6})
    args = {"scheduling_strategy": "SPREAD"} | REUSED
    expected = keys(StreamDataLoader(dataset(known=known)))
    loader, found = remote(dataset(slow, known=known), 4, max_restarts=1, ray_remote_args=args), []
    for batch in loader:
        found.append(key(batch))
        if batch.batch_index == 3:
            assert node.node_id in {place.node for place in loader._starter.pool.workers.mail.processes.values()}
            cluster.remove_node(node)
    assert found == expected
    assert loader.stats().restarts == 1


class Killer:
    """Streams of which one kills its process."""

    def __init__(self, how):
        self.how = how

    def __call__(self, n):
        for i in range(n):
            if (n, i) == (17, 5):
                self.how()
            yield np.full(4, i)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", [kill, sys.exit])
def test_a_source_that_kills_its_worker_is_named(how):
    data = dataset(Killer(how), [14, 19, 12, 17, 5], batch_size=2, shuffle=False)
    with pytest.raises(WorkerDeathError, match=r"on node .*reading source 3 \(17\)"):
        keys(remote(data, 2, max_restarts=1))


def test_a_source_that_kills_again_and_again_is_skipped():
    data = dataset(Killer(kill), [14, 19, 12, 17, 5], batch_size=2, shuffle=False, on_error="skip")
    loader = remote(data, 2, max_restarts=4)
    read = Counter(index for batch in loader for index in batch.source_index[batch.mask].tolist())
    assert [read[index] for index in (0, 1, 2, 4)] == [14, 19, 12, 5]
    assert 0 < read[3] <= 5
    assert [failure.source_index for failure in loader.failures] == [3]


def broken(n):
    for i in range(n):
        if (n, i) == (13, 7):
            raise ValueError("bad frame")
        yield np.full(4, i)


def read_until_error(loader):
    found = []
    try:
        for batch in loader:
            found.append(key(batch))
    except StreamError as error:
        return found, error.source_index, error.position, error.lane
    raise AssertionError("no error")


@pytest.mark.parametrize("known", [True, False])
def test_errors_are_raised_in_place_of_their_batch(known):
    alone = read_until_error(StreamDataLoader(dataset(broken, known=known)))
    assert read_until_error(remote(dataset(broken, known=known))) == alone


def missing_file(n):
    return np.load(f"/not/on/this/node/{n}.npy")


def test_a_file_that_a_node_does_not_have_is_an_error_that_names_the_node():
    with pytest.raises(
        OpenError, match=rf"worker \d on node {socket.gethostname()}: open_stream raised FileNotFoundError"
    ):
        keys(remote(dataset(missing_file), 2))


def test_ctrl_c_ends_the_wait_and_the_state_goes_on():
    loader, expected = remote(dataset(slow)), keys(StreamDataLoader(dataset(slow)))
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    found = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for batch in loader:
            found.append(key(batch))
            if len(found) == 2:
                interrupt.start()
    assert found == expected[: len(found)]
    rest = remote(dataset(slow), 2)
    rest.load_state_dict(loader.state_dict())
    assert found + keys(rest) == expected


INTERRUPTED = """
import sys, time
import numpy as np, ray
from stream_dataloader import StreamDataLoader, StreamDataset

def slow(n):
    for i in range(n):
        time.sleep(0.02)
        yield np.full(4, i)

if __name__ == "__main__":
    ray.init(address=sys.argv[1], logging_level="ERROR")
    options = {"persistent_workers": True, "ray_remote_args": {"max_calls": 1}}
    loader = StreamDataLoader(StreamDataset([5000] * 8, slow, 4, time_steps=2), 2, worker_method="ray", **options)
    try:
        for batch in loader:
            if batch.batch_index == 3:
                print(*[place.pid for place in loader._starter.pool.workers.mail.processes.values()], flush=True)
    except KeyboardInterrupt:
        print("interrupted at", time.time(), flush=True)
"""


def is_alive(pid):
    return pathlib.Path(f"/proc/{pid}").exists()


def test_ctrl_c_in_a_terminal_ends_the_program_and_its_workers(cluster, tmp_path):
    (tmp_path / "program.py").write_text(INTERRUPTED)
    command = [sys.executable, tmp_path / "program.py", cluster.address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = subprocess.Popen(command, start_new_session=True, **pipes)
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    began = time.time()
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: the whole group gets it
    printed, errors = program.communicate(timeout=PATIENCE)
    assert float(printed.removeprefix("interrupted at")) - began < 5
    assert program.returncode == 0
    assert "Traceback" not in errors, errors
    assert soon(lambda: not any(map(is_alive, pids)), PATIENCE), "workers outlive their program"


def test_broken_streams_are_skipped_alike():
    loaders = [StreamDataLoader(dataset(broken, on_error="skip")), remote(dataset(broken, on_error="skip"))]
    assert keys(loaders[0]) == keys(loaders[1])
    assert len(loaders[0].failures) == len(loaders[1].failures) == 3


def test_local_classes_come_back_and_what_cannot_be_sent_is_an_error():
    class Thing:
        pass

    batch = next(iter(remote(dataset(lambda n: ({"x": i, "thing": Thing()} for i in range(n))), 2)))
    assert type(batch.data["thing"][0][0]) is Thing
    with pytest.raises(ItemError, match="cannot be pickled"):
        keys(remote(dataset(lambda n: (threading.Lock() for _ in range(n))), 2))


def test_workers_that_find_no_place_are_an_error_that_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(pool, "LONGEST_START_SECONDS", 2.0)
    with pytest.raises(WorkerTimeoutError, match=r"worker 0 has not begun.*'num_gpus': 1.*free are CPU"):
        keys(remote(dataset(), 2, ray_remote_args={"num_gpus": 1}))


def test_what_a_worker_cannot_unpickle_is_an_error_with_the_node(monkeypatch):
    module = types.ModuleType("only_here")
    exec("def only(n): return iter(range(n))", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(WorkerError, match=r"node .* cannot unpickle.*only_here.*runtime_env"):
        keys(remote(dataset(module.only), 2))


def test_another_version_of_the_library_is_refused(monkeypatch):
    monkeypatch.setattr(pool, "library_version", lambda: "0.0.1")
    with pytest.raises(WorkerError, match=r"node .* has stream_dataloader .* the trainer has 0.0.1"):
        keys(remote(dataset(), 2))


def test_ray_that_is_not_initialized_is_an_error(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"call ray.init\(address=.auto.\)"):
        next(iter(remote(dataset(), 2)))


def test_the_example_goes_on_without_workers(cluster):
    printed = run_program(ROOT / "examples" / "ray_workers.py", "--address", cluster.address, "--batches", 7)
    more, total = map(int, re.search(r"without workers: (\d+) more, of (\d+)", printed).groups())
    assert 7 + more == total


class Letters:
    """Streams with random numbers; some of them end their process, or cannot be read, as long as a file is there."""

    def __init__(self, folder=None, kills=(), fails=()):
        self.folder, self.kills, self.fails = folder, kills, fails

    def __call__(self, n):
        if self.folder is not None and n in self.kills:
            with contextlib.suppress(FileExistsError):
                (self.folder / f"killed {n}").touch(exist_ok=False)
                kill()
        if self.folder is not None and n in self.fails and (self.folder / "fails").exists():
            raise OSError("unreadable")
        noise = np.random.default_rng(get_stream_info().seed).integers(0, 1 << 30)
        for i in range(n % 5 + 1):
            yield {"n": np.int64(n), "i": np.int64(i), "noise": noise}


def packed(path):
    sources, store = stores.open(path)
    found = [
        (store.key(one), store.metadata(one), [{k: v.item() for k, v in item.items()} for item in store(one)])
        for one in sources
    ]
    assert not store.verify()
    return found


def pack(path, letters, **options):
    how = {"seed": 3, "stream_metadata": lambda n: {"of": n}, "metadata": {"a": 1}}
    return stores.pack((list(range(30)), letters), path, progress=False, **how, **options)


@pytest.fixture(scope="module")
def packed_at_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("at once") / "a"
    pack(path, Letters())
    return packed(path)


@pytest.mark.parametrize("format", ["memmap", "mds"])
def test_a_store_that_tasks_pack_is_the_one_that_is_packed_at_once(tmp_path, packed_at_once, format):
    calls = []
    how = {"stream_metadata": lambda n: {"of": n}, "metadata": {"a": 1}, "progress": lambda *done: calls.append(done)}
    streams = list(range(30)), Letters()
    report = stores.pack(streams, tmp_path / "a", format=format, seed=3, num_workers=2, worker_method="ray", **how)
    assert packed(tmp_path / "a") == packed_at_once
    assert (report.streams, report.steps) == (30, sum(len(items) for *_, items in packed_at_once))
    assert calls[-1] == (30, 30)
    assert len(calls) == 8
    with pytest.raises(FileExistsError):
        pack(tmp_path / "a", Letters(), num_workers=2, worker_method="ray")


def test_a_task_that_is_killed_while_it_packs_costs_nothing_but_time(tmp_path, packed_at_once):
    letters = Letters(tmp_path, kills={4, 20})
    report = pack(tmp_path / "a", letters, num_workers=2, worker_method="ray")
    assert sorted(path.name for path in tmp_path.glob("killed *")) == ["killed 20", "killed 4"]
    assert packed(tmp_path / "a") == packed_at_once
    assert report.streams == 30


def test_after_an_error_only_unfinished_parts_are_packed_again_also_with_other_workers(tmp_path, packed_at_once):
    (tmp_path / "fails").touch()
    letters = Letters(tmp_path, fails={13})
    with pytest.raises(StreamError, match=r"source 13.*unreadable.*pack again"):
        pack(tmp_path / "a", letters, num_workers=2, worker_method="ray")
    with pytest.raises(StoreError, match="has the parts"):
        stores.open(tmp_path / "a")
    before = {file: file.stat().st_ino for file in (tmp_path / "a").glob("*-of-8/*")}
    assert before
    (tmp_path / "fails").unlink()
    report = pack(tmp_path / "a", letters, num_workers=3, worker_method="ray")
    assert 0 < report.packed_before < 30
    after = {file: file.stat().st_ino for file in (tmp_path / "a").glob("*-of-8/*")}
    assert before.items() <= after.items(), "a finished part was packed again"
    assert packed(tmp_path / "a") == packed_at_once


def test_streams_that_tasks_cannot_read_are_skipped_and_reported(tmp_path):
    (tmp_path / "fails").touch()
    letters = Letters(tmp_path, fails={13, 14})
    report = pack(tmp_path / "a", letters, num_workers=2, worker_method="ray", on_error="skip")
    assert [error.source_index for error in report.skipped] == [13, 14]
    assert report.streams == 28
