"""Limits of the system that a job, a shell or a container sets: what was refused is told, and how to get it."""

import re
import threading

import pytest

from stream_dataloader import StreamDataLoader, StreamDataset

PROGRAM = """
import os, resource, sys
from stream_dataloader import StreamDataLoader, StreamDataset

def pages():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def limited(name, value):
    which = getattr(resource, f"RLIMIT_{name}")
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        read()
    except OSError as error:
        print(type(error).__name__, error)
    finally:
        resource.setrlimit(which, before)

lengths = [7, 3, 5, 4]

def read():
    loader = StreamDataLoader(StreamDataset(lengths, range, 2, time_steps=2, seed=0), 2, multiprocessing_context="fork")
    return sorted(int(item) for batch in loader for item in batch.data[batch.mask])

if __name__ == "__main__":
    limited(*(("AS", pages() + (20 << 20)) if sys.argv[1] == "AS" else (sys.argv[1], int(sys.argv[2]))))
    print(read() == sorted(i for n in lengths for i in range(n)))
"""


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (("NOFILE", "9"), r"Too many open files: the system refuses .*\(ulimit -n\)"),
        (("FSIZE", "4096"), r"File too large: the system refuses 67,108,864 bytes of memory that .*\(ulimit -f\)"),
        (("AS",), r"Cannot allocate memory: the system refuses 67,108,864 bytes of memory that .*\(ulimit -v"),
    ],
    ids=["files", "sizes", "memory"],
)
def test_what_the_system_refuses_is_told_with_its_limit_and_may_be_had_later(limit, told, programs):
    done = programs(PROGRAM, *limit)
    assert done.returncode == 0, done.stderr[-3000:]
    error, *read = done.stdout.splitlines()
    assert read == ["True"], done.stdout
    assert re.search(told, error), error


def test_a_thread_that_the_system_refuses_is_told_with_its_limit_and_may_be_had_later():
    loader = StreamDataLoader(StreamDataset([3], range, 1, time_steps=3), 1, worker_method="thread")
    before = threading.stack_size(1 << 46)  # more than a process can have; root has no limit of processes
    try:
        with pytest.raises(OSError, match=r"start new thread: the system refuses a thread, 'stream-.*\(ulimit -u"):
            next(iter(loader))
    finally:
        threading.stack_size(before)
    assert [batch.data.tolist() for batch in loader] == [[[0], [1], [2]]]
