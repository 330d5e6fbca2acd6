"""Programs that reap children themselves: supervisors, process 1 of a container, loops around `waitpid(-1)`."""

import pytest

#: Ways in which a program takes the exit status of its children before the loader does.
REAPERS = {
    "handler": "signal.signal(signal.SIGCHLD, reap)",
    "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "thread": "threading.Thread(target=reap_for_ever, daemon=True).start()",
}

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, threading, time, warnings
from cases import Case, keys
from worker_streams import acting, few, kill_self
from stream_dataloader import StreamDataLoader, StreamDataset, errors
from pathlib import Path

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

def reap_for_ever():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.001)

def loader(acts, workers=2, **options):
    return StreamDataLoader(StreamDataset(range(6), acting(acts), 4, time_steps=2, seed=0), workers, **options)

def raised(what):
    try:
        list(what)
    except errors.WorkerDeathError as error:
        return str(error)

def check(method):
    options = {"multiprocessing_context": method}
    expected = keys(loader({}, 0))
    for persistent in (False, True):
        kept = loader({}, persistent_workers=persistent, **options)
        assert [keys(kept) == expected, len(keys(kept)) > 0] == [True, True], "nobody died"
    told = raised(loader({(3, 4): kill_self}, **options))
    print(told, file=sys.stderr)
    assert told and "worker 1 (pid " in told and "reading source 3 (3)" in told, told
    assert "was killed by SIGKILL" in told or "an unknown status" in told and "SIGCHLD" in told, "who came first"
    told = raised(loader({}, worker_init_fn=lambda _: kill_self(), **options))
    assert told and "while it started" in told, told
    again = loader({(3, 4): few(Path(f"died-{method}"), kill_self)}, max_restarts=2, **options)
    assert keys(again) == expected
    assert again.stats().restarts == 1
    for _ in kept:
        pass
    multiprocessing.active_children()[0].kill()
    time.sleep(0.1)  # it may be alive or not when it is asked for work: both are found
    with warnings.catch_warnings(record=True):
        try:
            list(kept)
        except errors.WorkerDeathError:
            pass
    assert len(keys(kept)) == len(expected)
    del kept, again
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not multiprocessing.active_children(), "none is taken for alive"

REAPER
if sys.argv[1] == "main":
    check("fork")
else:  # torch handles SIGCHLD itself in the main thread alone
    failed = []
    def run():
        try:
            check("fork")
        except BaseException as error:
            failed.append(error)
            raise
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
print("right")
"""


@pytest.mark.one_of_each
@pytest.mark.timeout(200)
@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("reaper", REAPERS)
def test_deaths_are_found_where_the_program_reaps_its_children(reaper, where, programs):
    done = programs(PROGRAM.replace("REAPER", REAPERS[reaper]), where)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-3000:]
