"""A worker process: its start, and the explanation of its end.

- Ctrl-C is for the main process, which ends the workers. So they start with SIGINT blocked.
- A worker whose main process died ends itself, even if it is stuck in user code.
- A worker ends when it is told to. If it exits before that, with any status, this counts as a death.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import NoReturn

import torch
from torch.utils.data._utils import worker as torch_worker

from stream_dataloader._engine.descriptors import open_standard
from stream_dataloader._engine.memory import main_module
from stream_dataloader._engine.memory.pickling import ByValue, dumps_home, note_fork
from stream_dataloader._engine.reading.activity import ENDINGS, WorkerStatus
from stream_dataloader._engine.reading.reader import PartReader
from stream_dataloader._engine.reading.worker_info import worker_info_hidden
from stream_dataloader._engine.workers.channel import EXIT, FAILED, READY, Begin, Port, ProcessMail, ProcessPort
from stream_dataloader._engine.workers.seeding import seed_worker
from stream_dataloader._engine.workers.serve import Dumps, error_of_init, serve
from stream_dataloader._engine.workers.shared import Shared
from stream_dataloader._engine.workers.torch_quirks import UNKNOWN_EXIT
from stream_dataloader.errors import ErrorReport

_WATCH_SECONDS = 1.0


@dataclass
class Job:
    """Arguments of a worker process.

    Attributes:
        mail: The loader's ends, which a forked worker inherits and closes; None if it inherits nothing.
        folder: See `shared_folder`.
        seed: Seed of the first session.
    """

    number: int
    workers: int
    port: ProcessPort
    shared: Shared
    init: ByValue
    mail: ProcessMail | None
    folder: str | None
    dtype: torch.dtype
    seed: int

    def run(self) -> None:
        parent = Parent()
        try:
            self._set_up(parent)
            if not prepare(self.number, self.workers, self.port, self.shared, self.init, self.dtype, self.seed):
                sys.exit(1)
            serve_reader(self.number, self.port, self.shared, dumps_home)
        except KeyboardInterrupt:  # a stream raised it, which the main process reports
            sys.exit(1)
        # The loader's end was closed without EXIT, so its process may be dying. Then this one removes the folder of the
        # other's sockets and ends at once.
        if self.port.is_lone and parent.dies_soon():
            _leave(self.folder)

    def _set_up(self, parent: Parent) -> None:
        open_standard()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a forkserver does not pass the blocked signal on to its children
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker has inherited the program's handler
        if self.mail is not None:
            note_fork()
            self.mail.close_in_worker(self.port)
        end_after(parent, self.folder)


def prepare(
    number: int, workers: int, port: Port, shared: Shared, init: ByValue, dtype: torch.dtype, seed: int
) -> bool:
    """Prepare a worker's process for the user's code; return False if its `worker_init_fn` failed, after `EXIT`."""
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # read when OpenCV loads; workers already fill the cores
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    seed += number
    seed_worker(seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=workers, seed=seed, dataset=shared.dataset
    )
    if init.value is not None:
        try:
            init.value(number)
        except Exception as error:
            port.send((FAILED, ErrorReport(error_of_init(error, is_sent=True))))
            # Wait for EXIT: a process that ended by itself would be reported as a death, not by this error.
            while port.receive() != EXIT:
                pass
            return False
    worker_info_hidden.for_good()
    port.send((READY,))
    return True


def serve_reader(number: int, port: Port, shared: Shared, dumps: Dumps) -> None:
    """Serve as the reader of a worker's process."""
    is_first = True

    def enter(begin: Begin) -> PartReader:
        nonlocal is_first
        if not is_first:  # a kept worker must draw the same numbers as a new one
            seed_worker(begin.seed + number)
        is_first = False
        return shared.enter(number, port.is_closed, begin)

    serve(port, enter, shared.most_steps, dumps)


class Parent:
    """The loader's process. The direct parent may be a forkserver instead, which outlives the loader's process."""

    def __init__(self) -> None:
        self._pid, self._started_by = os.getppid(), multiprocessing.parent_process()

    def is_alive(self) -> bool:
        return os.getppid() == self._pid and (self._started_by is None or self._started_by.is_alive())

    def dies_soon(self) -> bool:
        """Return whether it is dying; a process closes its descriptors a little before it has ended."""
        deadline = time.monotonic() + _WATCH_SECONDS
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(_WATCH_SECONDS / 100)
        return not self.is_alive()


def end_after(parent: Parent, folder: str | None) -> None:
    """End this process soon after its parent, even if it is stuck, and remove the parent's folder."""

    def watch() -> None:
        time.sleep(_WATCH_SECONDS)  # sleeps first: looking at the parent copies pages of a forked process
        while parent.is_alive():
            time.sleep(_WATCH_SECONDS)
        _leave(folder)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _leave(folder: str | None) -> NoReturn:
    """End at once, as the loader's process is gone; remove its folder, even if other workers have files in it."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def how_it_ended(exit_code: int) -> str:
    """Describe the end of a process, in words that follow its name."""
    if exit_code == UNKNOWN_EXIT:
        return "ended with an unknown status"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    known = {number.value: number.name for number in signal.Signals}  # most real-time signals have no name
    return f"was killed by {known.get(-exit_code, f'signal {-exit_code}')}"


def advice(processes: Sequence[BaseProcess], status: WorkerStatus, died: Iterable[int], method: str) -> str:
    """Return the probable cause of workers' deaths, and a remedy."""
    codes = [code for process in processes if (code := process.exitcode)]
    if -1 in died and method != "fork" and not (codes and min(codes) < 0):
        return _advice_for_start(method)
    if UNKNOWN_EXIT in codes:
        return "A handler of SIGCHLD or a waitpid(-1) in the program took its exit status; its stderr may say more"
    if ending := status.raised.max():
        return f"A stream raised {ENDINGS[ending]}, which ends a worker; raise an Exception instead"
    if not codes or min(codes) > 0:
        return "Its code called sys.exit or os._exit; its stderr may say more"
    if sent := {-code for code in codes} & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}:
        name = signal.Signals(min(sent)).name
        return f"It got {name}, maybe sent to the whole process group; to ignore it, set a handler in worker_init_fn"
    if -signal.SIGKILL in codes or -signal.SIGBUS in codes:
        return "If it was out of memory, use fewer workers, a smaller prefetch_factor or smaller items"
    return "If the signal was not sent on purpose, a library crashed; faulthandler.enable() in worker_init_fn shows it"


def _advice_for_start(method: str) -> str:
    if (missing := main_module.missing_script()) is not None:
        what = f"Workers of the start method {method!r} run the program's file, and there is no {missing}"
        return f'{what}: save the program in a file, or pass multiprocessing_context="fork"'
    script = main_module.read_script()
    others = "workers must be able to import everything that the dataset holds; their stderr says more"
    if script is None or script.has_guard:
        return f"With {method!r} {others}"
    return (
        f'The script has no `if __name__ == "__main__":`, and workers of the start method {method!r} run it again: put '
        f"the code that uses the loader under it. Otherwise, {others}"
    )
