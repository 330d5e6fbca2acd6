"""Workers read what is defined in the cells of a notebook: in a real kernel, with each way to start a process.

A kernel takes seconds to start, so all cases of a test's fixture run in one, each in a cell of its own.
"""

import re

import nbformat
import psutil
import pytest
from helpers import PATIENCE, run_notebook

SETUP = """
import multiprocessing, os, signal, threading, time
from stream_dataloader import StreamDataLoader, StreamDataset
multiprocessing.set_forkserver_preload(["stream_dataloader"])
scale = 2

def scaled(i):
    return scale * i

def open_scaled(length):
    for i in range(length):
        yield scaled(i)

def loader_of(open_stream, method, **options):
    dataset = StreamDataset([3, 2], open_stream, 2, time_steps=3)
    return StreamDataLoader(dataset, workers, multiprocessing_context=method, **options)

def read(*arguments, **options):
    return [batch.data.T.tolist() for batch in loader_of(*arguments, **options)]
"""
SCALED = "[[[0, 2, 4], [0, 2, 0]]]"

#: By name: a cell, and what it prints.
CASES = {
    "function": ("print(read(open_scaled, method))", SCALED),
    "closure and class": (
        """
class Opening:
    def __init__(self, by):
        self.by = by
    def opening(self):
        return lambda length: (self.by * i for i in range(length))
    def __call__(self, length, start=0):
        return self.opening()(length)
print(read(Opening(4), method), read(Opening(3).opening(), method))
""",
        "[[[0, 4, 8], [0, 4, 0]]] [[[0, 3, 6], [0, 3, 0]]]",
    ),
    "worker_init_fn": (
        """
def init(worker):
    global scale
    scale = 10
print(read(open_scaled, method, worker_init_fn=init), scale)
""",
        "[[[0, 10, 20], [0, 10, 0]]] 2",
    ),
    "collate_fn": (
        """
def collate(windows):
    return [scaled(int(window.sum())) for window in windows]
print(list(loader_of(range, method, collate_fn=collate)))
""",
        "[[6, 2]]",
    ),
    "items": (
        """
class Word:
    def __init__(self, text):
        self.text = text
def words(length):
    return (Word(str(i)) for i in range(length))
for batch in loader_of(words, method):
    print([[type(word) is Word and word.text for word in row] for row in batch.data])
""",
        "[['0', '0'], ['1', '1'], ['2', False]]",
    ),
    "torch's loader": (
        """
from torch.utils.data import DataLoader
dataset = StreamDataset([3, 2], open_scaled, 2, time_steps=3)
parts = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method)
print([lane for part in parts for lane in part.data.T.tolist()])
""",
        "[[0, 2, 4], [0, 2, 0]]",
    ),
    "queue": (
        """
queue = multiprocessing.get_context(method).Queue()
def telling(length):
    queue.put(length)
    return range(length)
read(telling, method)
print(sorted(queue.get(timeout=60) for _ in range(2)))
""",
        "[2, 3]",
    ),
    "interrupt": (
        """
loader = loader_of(open_scaled, method, persistent_workers=True)
try:
    for batch in loader:
        os.killpg(0, signal.SIGINT)  # as the button does: the kernel, and all that it started
        time.sleep(600)
except KeyboardInterrupt:
    print([batch.data.T.tolist() for batch in loader])
""",
        SCALED,
    ),
    "lock": (
        """
lock = threading.Lock()
def guarded(length):
    with lock:
        yield from range(length)
print(read(guarded, method))
""",
        "[[[0, 1, 2], [0, 1, 0]]]",  # only where it is forked
    ),
    "printing": (
        """
def talking(length):
    if length == 3:
        print("said by a worker", flush=True)
    yield from range(length)
read(talking, method)
time.sleep(3)  # what a worker prints comes by a thread of the kernel
""",
        "said by a worker",
    ),
    "workers": ("print('pids', *(child.pid for child in multiprocessing.active_children()))", None),
}


class Shown:
    """What a cell showed: what was printed, and the error."""

    def __init__(self, cell):
        self.printed = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        self.errors = [f"{o.ename}: {o.evalue}" for o in cell.outputs if o.output_type == "error"]


def run_cells(sources, folder):
    before, after = folder / "before.ipynb", folder / "after.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]), before)
    run_notebook(before, after, folder)
    return nbformat.read(after, as_version=4).cells


def run_cases(methods, folder):
    """All cases with each start method, in one kernel: (case, method) -> what was shown."""
    names = [(name, method) for method in methods for name in CASES]
    workers = {"fork": 2, "forkserver": 2, "spawn": 1}  # each imports torch: seconds
    sources = [f"method, workers = {method!r}, {workers[method]}\n{CASES[name][0].strip()}" for name, method in names]
    setup, *cells = run_cells([SETUP, *sources], folder)
    assert not Shown(setup).errors
    return dict(zip(names, map(Shown, cells), strict=True))


METHODS = ["fork", "forkserver", "spawn"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What a case shows with a start method: processes are forked in one kernel, and started anew in another."""
    runs = {}

    def find(case, method):
        methods = ("fork",) if method == "fork" else ("forkserver", "spawn")
        if methods not in runs:
            runs[methods] = run_cases(methods, tmp_path_factory.mktemp(method))
        return runs[methods][case, method]

    return find


pytestmark = pytest.mark.slow  # a kernel takes seconds to start


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "workers"])
def test_what_is_defined_in_a_cell(case, method, shown):
    found, expected = shown(case, method), CASES[case][1]
    if case == "lock" and method != "fork":
        (error,) = found.errors
        assert re.match("TypeError: open_stream .*guarded.* cannot be pickled .*lock.*create locks, open files", error)
    else:
        assert not found.errors
        assert found.printed.strip() == expected


@pytest.mark.parametrize("method", METHODS)
def test_no_worker_outlives_the_kernel(method, shown):
    pids = list(map(int, shown("workers", method).printed.split()[1:]))
    assert pids  # those that were kept by the loader that was interrupted
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=PATIENCE)
    assert not any(map(psutil.pid_exists, pids))
