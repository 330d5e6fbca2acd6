"""Worker processes as users meet them: how they start, what they are sent, how they end."""

import enum
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from cases import Case, keys
from helpers import PATIENCE, START_METHODS, make_loader, soon

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import WorkerDeathError

SPAWNING = ["spawn", "forkserver"]


def run(script, folder, **options):
    path = folder / "script.py"
    path.write_text(script)
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "cwd": folder} | options
    return subprocess.run([sys.executable, path], check=False, **options)


@pytest.mark.parametrize("limit", [None, 5])
def test_tracebacks_in_workers_are_as_long_as_elsewhere(limit, monkeypatch):
    monkeypatch.setattr(sys, "tracebacklimit", limit, raising=False)
    dataset = StreamDataset([0], lambda _: [sys.tracebacklimit or 0], 1, time_steps=1)
    loader = StreamDataLoader(dataset, 1, multiprocessing_context="fork")
    assert [batch.data.item() for batch in loader] == [limit or 0]


@pytest.mark.parametrize("method", START_METHODS)
def test_the_first_worker_reads_while_the_second_is_started(method, monkeypatch, tmp_path):
    process_type = multiprocessing.get_context(method).Process
    begin, started, met = process_type.start, [], []

    def start(process):
        if started:
            met.append(soon((tmp_path / "0").exists))
        started.append(process)
        begin(process)

    monkeypatch.setattr(process_type, "start", start)
    dataset = StreamDataset([tmp_path / "0", tmp_path / "1"], touched, 2, time_steps=1)
    assert len(list(StreamDataLoader(dataset, 2, multiprocessing_context=method))) == 1
    assert met == [True]


def touched(path):
    path.touch()
    yield int(path.name)


# A worker that was kept


@pytest.mark.parametrize("max_restarts", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_kept_worker_that_dies_while_an_epoch_starts(max_restarts):
    case = Case([5, 3, 4, 2], lanes=2, time_steps=2)
    serial = StreamDataLoader(case.dataset())
    expected = [keys(serial) for _ in range(3)]
    loader = StreamDataLoader(case.dataset(), 2, persistent_workers=True, max_restarts=max_restarts)
    assert keys(loader) == expected[0]
    victim = multiprocessing.active_children()[0].pid
    os.kill(victim, signal.SIGSTOP)
    timer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    timer.start()
    if max_restarts:
        assert keys(loader) == expected[1]
    else:
        with pytest.raises(WorkerDeathError, match=rf"\(pid {victim}\) was killed by SIGKILL"):
            list(loader)
    timer.join()
    assert keys(loader) == expected[2], "the next epoch is read as ever"


LEFT = """
import gc
import os
from stream_dataloader import StreamDataLoader, StreamDataset

def read(source):
    yield source

def loader():
    return StreamDataLoader(StreamDataset([1, 2], read, 2, time_steps=1), 2, multiprocessing_context="fork")

gc.disable()
circle = [iter(loader())]
next(circle[0])
circle.append(circle)
del circle
os.register_at_fork(after_in_child=gc.collect)
assert len(list(loader())) == 1
"""


@pytest.mark.slow
def test_workers_leave_the_garbage_of_the_main_process_alone(tmp_path):
    done = run(LEFT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# What workers are sent, and send back


MINE = """
import enum, sys, threading
from stream_dataloader import StreamDataLoader, StreamDataset

if __name__ == "__main__":
    class Kind(enum.Enum):
        CLICK = 1
        KEY = 2

    class Source:
        def __init__(self, kind):
            self.kind = kind

    class Mine(StreamDataset):
        pass

    def read(source):
        assert isinstance(source, Source) and isinstance(source.kind, Kind)
        yield {{"kind": source.kind, "n": 1}}

    sources = [Source(Kind.CLICK), Source(Kind.KEY)]
    loader = StreamDataLoader(Mine(sources, read, 2, time_steps=1), 2, multiprocessing_context={method!r})
    print([[kind is Kind.CLICK, isinstance(kind, Kind)] for batch in loader for kind in batch.data["kind"][0]])

"""


@pytest.mark.parametrize("method", SPAWNING)
def test_what_is_defined_under_the_main_guard_comes_back_as_itself(method, tmp_path):
    done = run(MINE.format(method=method), tmp_path)
    assert done.stdout == "[[True, True], [False, True]]\n", done.stderr


ASSIGNED = 0


def test_functions_that_go_by_value_share_their_global_names():
    def init(worker):
        global ASSIGNED
        ASSIGNED = worker + 1

    def read(number):
        yield ASSIGNED

    options = {"multiprocessing_context": "forkserver", "worker_init_fn": init}
    (batch,) = make_loader([1, 2], read, 2, time_steps=1, on_error=lambda _: "raise", num_workers=2, **options)
    assert batch.data.tolist() == [[1, 2]]
    assert ASSIGNED == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_local_classes_come_back_as_themselves(method):
    class Kind(enum.Enum):
        CLICK = 1
        KEY = 2

    def read(number):
        yield {"kind": Kind(number), "n": 1}

    loader = StreamDataLoader(StreamDataset([1, 2], read, 2, time_steps=1), 2, multiprocessing_context=method)
    (batch,) = loader
    assert batch.data["kind"][0] == list(Kind)


def test_a_class_made_between_two_epochs_comes_back_as_itself():
    kinds = []

    def new_kind():
        class Kind:
            pass

        return Kind

    def read(number):
        yield {"kind": kinds[-1]() if number else new_kind()()}

    loader = StreamDataLoader(StreamDataset([0, 1], read, 2, time_steps=1), 2, multiprocessing_context="fork")
    for _ in range(2):
        kinds.append(new_kind())
        (batch,) = loader
        made_there, made_here = map(type, batch.data["kind"][0])
        assert made_here is kinds[-1]
        assert made_there.__name__ == made_here.__name__
        assert made_there is not made_here


@pytest.mark.slow
def test_a_missing_main_guard_is_named_first(tmp_path):
    script = """
from stream_dataloader import StreamDataLoader, StreamDataset
list(StreamDataLoader(StreamDataset(range(2), range, 2, time_steps=1), 1, multiprocessing_context="spawn"))
"""
    last = run(script, tmp_path).stderr.strip().splitlines()[-1]
    assert re.search(r"WorkerDeathError: a worker \(pid \d+\) exited with status 1 while it started", last)
    assert 'The script has no `if __name__ == "__main__":`' in last
    assert "memory" not in last


@pytest.mark.slow
def test_a_program_that_has_no_file_hears_what_workers_need():
    script = """
from stream_dataloader import StreamDataLoader, StreamDataset
if __name__ == "__main__":
    list(StreamDataLoader(StreamDataset(range(2), range, 2, time_steps=1), 1, multiprocessing_context="spawn"))
"""
    done = subprocess.run([sys.executable, "-"], check=False, input=script, capture_output=True, encoding="utf-8")
    last = done.stderr.strip().splitlines()[-1]
    assert "run the program's file, and there is no <stdin>: save the program in a file" in last


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("method", SPAWNING)
def test_what_cannot_be_pickled_is_named(method):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"open_stream \(.*\) cannot be pickled \(.*lock"):
        list(make_loader([1], lambda source: [lock], 1, time_steps=1, num_workers=1, multiprocessing_context=method))


def test_ctrl_c_while_workers_start_is_for_the_main_process(programs):
    script = """
import os, signal
from stream_dataloader import StreamDataLoader, StreamDataset

class Interrupting:
    sent = 0

    def __reduce__(self):  # Ctrl-C between the starts of two workers
        Interrupting.sent += 1
        if Interrupting.sent == 2:
            os.killpg(0, signal.SIGINT)
        return Interrupting, ()

    def __call__(self, source):
        return range(source)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    dataset = StreamDataset(range(2), Interrupting(), 2, time_steps=1)
    list(StreamDataLoader(dataset, 2, multiprocessing_context="spawn"))
"""
    errors = programs(script, alone=True).stderr
    assert errors.count("Traceback") == 1, errors
    assert errors.endswith("KeyboardInterrupt\n")
    assert "_launch" not in errors, "no worker is left half-way"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_killed_main_process_leaves_no_folder(method, tmp_path):
    temporary = pathlib.Path(tempfile.mkdtemp())  # not in tmp_path: sockets lie there, whose paths must be short
    script = f"""
import dataclasses, os, signal
import numpy as np
from stream_dataloader import StreamDataLoader, StreamDataset

def read(n):
    while True:
        yield np.zeros(100_000)

if __name__ == "__main__":
    dataset = StreamDataset(range(2), read, 2, time_steps=1)
    loader = StreamDataLoader(dataset, 2, multiprocessing_context={method!r})
    starter = loader._starter
    starter.renew(dataclasses.replace(starter._work.settings, uses_slots=False))
    for batch in loader:
        if batch.batch_index == 2:
            print(os.listdir(os.environ["TMPDIR"]), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(script, tmp_path, env=os.environ | {"TMPDIR": str(temporary)})
    assert "pymp-" in done.stdout
    while any(temporary.iterdir()):
        time.sleep(0.1)
    temporary.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, ["json"]], ids=["unset", "the user's own"])
def test_the_server_of_forkserver_imports_torch_once_for_all_workers(own, tmp_path):
    script = f"""
import multiprocessing, os
import multiprocessing.forkserver
from stream_dataloader import StreamDataLoader, StreamDataset

def in_server(n):
    with open(f"/proc/{{os.getppid()}}/maps") as maps:  # of the process that this one was forked from
        yield "libtorch" in maps.read()

if __name__ == "__main__":
    if {own!r}:
        multiprocessing.set_forkserver_preload({own!r})
    dataset = StreamDataset([1, 1], in_server, 2, time_steps=1)
    for _ in range(2):
        loader = StreamDataLoader(dataset, 2, multiprocessing_context="forkserver")
        print([batch.data.tolist() for batch in loader])
"""
    there = own is None
    assert run(script, tmp_path).stdout.split("\n")[:2] == [f"[[[{there}, {there}]]]"] * 2


# A process that is forked while an epoch is read

FORKED = """
import gc, os, sys, threading
from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import IteratorError

def read(n):
    for i in range(6):
        yield 10 * n + i

def data(batches):
    return [batch.data.tolist() for batch in batches]

def check_next(loader, batches):
    try:
        next(batches)
    except IteratorError:
        return
    raise AssertionError

def check_close(loader, batches):
    batches.close()
    check_next(loader, batches)

def check_anew(loader, batches):
    assert data(loader) == expected

def check(action, *args, **options):
    loader = StreamDataLoader(StreamDataset(range(4), read, 2, time_steps=1), *args, **options)
    batches = iter(loader)
    found = [next(batches).data.tolist() for _ in range(3)]
    taken, done = threading.Event(), threading.Event()

    def take():  # as a thread does that is in the middle of next()
        with loader._turn.lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=take)
    thread.start()
    taken.wait()
    if not (child := os.fork()):
        action(loader, batches)
        del loader, batches
        gc.collect()
        if action is check_next and args == (2,):
            sys.exit()  # which takes Python a while: once for all
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, (action, options)
    done.set()
    thread.join()
    assert found + data(batches) == expected
    assert loader.stats().restarts == 0

gc.freeze()
expected = data(StreamDataLoader(StreamDataset(range(4), read, 2, time_steps=1)))
for action in (check_next, check_close, check_anew):
    check(action)
    check(action, 2)
    check(action, 2, persistent_workers=True)
    check(action, 2, worker_method="thread")
"""


def test_a_process_that_is_forked_in_the_middle_of_an_epoch_leaves_it_alone(programs):
    done = programs(FORKED)
    assert (done.returncode, done.stderr) == (0, "")
