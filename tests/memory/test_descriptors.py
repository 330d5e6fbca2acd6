"""Programs that were started without standard streams: 0, 1 and 2 are the lowest free descriptors."""

import itertools
import json
import subprocess
import sys

import pytest

PROGRAM = """
import dataclasses, os, pathlib, sys, threading, time
import numpy as np
import torch
from stream_dataloader import StreamDataLoader, StreamDataset, stores

LENGTHS = [9, 12, 7, 8]
CLOSED = [number for number in range(3) if str(number) in sys.argv[2]]
seen = set()

def look(where):
    for number in CLOSED:
        try:
            if (target := os.readlink(f"/proc/self/fd/{number}")) != "/":  # a placeholder, while something is opened
                seen.add(f"{where}: {number} is {target}")
        except OSError:
            pass

def noise():
    for number in CLOSED:
        try:
            os.write(number, b"[h264] error while decoding" * 60)  # as FFmpeg, OpenCV, libjpeg do
        except OSError:
            pass

class Noisy:
    def __init__(self, kind=np.ones):
        self.kind = kind

    def __call__(self, length, start=0):
        for item in range(start, length):
            noise()
            yield item * self.kind(5000)  # more than fits into a message

def killing(length, start=0):
    for item, value in zip(range(start, length), Noisy()(length, start)):
        if (length, item) == (12, 8) and not os.path.exists("died"):
            open("died", "w").close()
            os._exit(3)
        yield value

def noise_for_ever():
    while CLOSED:
        noise()
        time.sleep(1e-4)

def check(**options):
    open_stream = options.pop("open_stream", Noisy())
    dataset = StreamDataset(LENGTHS, open_stream, 2, time_steps=2, seed=0)
    messages = options.pop("messages", False)
    loader = StreamDataLoader(dataset, timeout=60, **options)
    if messages:
        starter = loader._starter
        starter.renew(dataclasses.replace(starter._work.settings, uses_slots=False))
    for epoch in range(1 + options.get('persistent_workers', False)):
        items = []
        for batch in loader:
            noise()
            look("in the loop")
            values = batch.data[batch.mask]
            assert (values == values[:, :1]).all(), options
            items += zip(batch.source_index[batch.mask].tolist(), values[:, 0].tolist())
        assert sorted(items) == [(s, p) for s, n in enumerate(LENGTHS) for p in range(n)], options

def run():
    threading.Thread(target=noise_for_ever, daemon=True).start()  # between any two lines
    check()
    check(num_workers=2, worker_method="thread")
    for method in METHODS:
        check(num_workers=2, multiprocessing_context=method, open_stream=Noisy(torch.ones))
        check(num_workers=2, multiprocessing_context=method, persistent_workers=True)
        check(num_workers=2, multiprocessing_context=method, messages=True, open_stream=Noisy(torch.ones))
    check(num_workers=2, multiprocessing_context="fork", max_restarts=1, open_stream=killing)
    assert os.path.exists("died")
    for workers in (0, 2):
        stores.pack((LENGTHS, Noisy()), f"packed{workers}", num_workers=workers, multiprocessing_context="fork")
        sources, packed = stores.open(f"packed{workers}")
        for source, length in zip(sources, LENGTHS):
            values = np.stack(list(packed(source)))
            assert (values == np.arange(length)[:, None]).all(), "the store"
    look("at the end")
    assert not seen, seen

METHODS = sys.argv[3:]
if __name__ == "__main__":
    streams = [(name, getattr(sys, name)) for name in ("stdin", "stdout", "stderr")]
    for number in CLOSED:
        if streams[number][1] is not None:  # as Python does where it was started without
            setattr(sys, streams[number][0], None)
            os.close(number)
    found = "right"
    try:
        run()
    except BaseException:
        import traceback
        found = traceback.format_exc()
    CLOSED.clear()
    pathlib.Path(sys.argv[1]).write_text(found)
    for name, stream in streams:
        setattr(sys, name, stream)
"""

COMBINATIONS = [
    pytest.param("".join(some), marks=() if "".join(some) in ("1", "012") else pytest.mark.slow)
    for count in (1, 2, 3)
    for some in itertools.combinations("012", count)
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("closed", COMBINATIONS)
def test_nothing_of_ours_takes_the_place_of_a_closed_standard_stream(closed, programs, tmp_path):
    programs(PROGRAM, tmp_path / "found", closed, "fork")
    assert (tmp_path / "found").read_text() == "right"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_nor_in_a_program_that_is_started_without_them(method, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "program.py", "found", "012", method]
    subprocess.run(command, timeout=250, check=False, cwd=tmp_path)
    assert (tmp_path / "found").read_text() == "right"


OPENING = """
import json, os, sys
import numpy as np
from stream_dataloader import StreamDataLoader, StreamDataset

def open_file():
    return os.open(__file__, os.O_RDONLY)

AT_IMPORT = -1 if __name__ == "__main__" else open_file()  # in workers that import the program

class Opens:
    def __init__(self):
        self.at_unpickling = -1

    def __getstate__(self):
        return {"at_unpickling": None}

    def __setstate__(self, state):
        self.at_unpickling = open_file()

    def __call__(self, source):
        yield np.array([AT_IMPORT, self.at_unpickling, open_file()])
        yield np.array([os.path.samefile(f"/proc/self/fd/{number}", os.devnull) for number in (0, 1, 2)]) + 0

if __name__ == "__main__":
    dataset = StreamDataset(range(2), Opens(), 2, time_steps=1)
    loader = StreamDataLoader(dataset, 2, multiprocessing_context=sys.argv[2])
    found, null = (batch.data[0].tolist() for batch in loader)
    with open(sys.argv[1], "w") as file:
        json.dump([found, null], file)
"""


@pytest.mark.parametrize(
    ("method", "closed"),
    [("fork", "2>&-"), *itertools.product(["spawn", "forkserver"], ["<&- >&- 2>&-", "2>&-"])],
)
def test_files_that_users_open_in_workers_are_no_standard_streams(method, closed, tmp_path):
    (tmp_path / "program.py").write_text(OPENING, encoding="utf-8")
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "program.py", "found", method]
    subprocess.run(command, timeout=250, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    found, null = json.loads((tmp_path / "found").read_text())
    own = 2 if method == "fork" else 0  # nothing is imported or unpickled in a forked worker
    assert all(descriptor > 2 for worker in found for descriptor in worker[own:]), "a library's warning overwrites it"
    closed_ones = [number for number in (0, 1, 2) if method != "fork" or number == 2]
    assert all(worker[number] for worker in null for number in closed_ones), "programs that a stream starts have it"
