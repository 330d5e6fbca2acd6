"""Worker processes: what they inherit, and how they and the main process learn of each other's end.

- Ctrl-C is for the main process, which ends the workers: they start with SIGINT blocked.
- A worker whose main process died ends itself, also if it is stuck in user code.
- A worker says when it is done; one that exits before, with whatever status, is a death.
- They end in a thread of their own: torch ends them in a `__del__`.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from stream_dataloader._descriptors import hold_standard
from stream_dataloader._memory import main_module
from stream_dataloader._memory.pickling import ByValue, note_fork
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.sessions import state_of
from stream_dataloader._workers.feed import Assignment, Crew
from stream_dataloader._workers.mailbox import Mailbox
from stream_dataloader._workers.packets import PacketContext
from stream_dataloader._workers.seeding import seed_worker
from stream_dataloader._workers.torch_quirks import JOIN_SECONDS, UNKNOWN_EXIT, shut_down

_WATCH_SECONDS = 1.0
_FAREWELL_SECONDS = JOIN_SECONDS - 1.0  # to all workers together; torch would give that to one after the other


class WorkerInit:
    """The `worker_init_fn` of the loader's workers; runs the user's own, if there is one."""

    def __init__(self, user_init: Callable[[int], Any] | None) -> None:
        self.folder: str | None = None  # see `shared_folder`
        self.forked = False
        self.dtype = torch.get_default_dtype()  # of the program, which only a process that is forked inherits
        self._traceback_limit = getattr(sys, "tracebacklimit", None)
        self._user_init = ByValue(user_init, "worker_init_fn")

    def __call__(self, worker_id: int) -> None:
        sys.tracebacklimit = self._traceback_limit
        hold_standard()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torch's handler exits with status 0, which names no signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # forkserver does not pass on a blocked one
        if self.forked:
            note_fork()
        watch_parent(self.folder)
        os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # read when it is loaded; workers are as many as cores
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
        torch.set_default_dtype(self.dtype)
        seed_worker(torch.initial_seed())  # torch seeds numpy in another way
        if self._user_init.value is not None:
            self._user_init.value(worker_id)


def watch_parent(folder: str | None) -> None:
    """End this process soon after its parent, and remove that one's folder."""
    parent, started_by = os.getppid(), multiprocessing.parent_process()

    def watch() -> None:  # a forkserver, the parent of its children, outlives the process that asked for them
        time.sleep(_WATCH_SECONDS)  # looking copies pages
        while os.getppid() == parent and (started_by is None or started_by.is_alive()):
            time.sleep(_WATCH_SECONDS)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class ProcessCrew(Crew):
    """Worker processes, as the main process knows them, and what torch has of them."""

    def __init__(self, board: ActivityBoard, work: Assignment, mailbox: Mailbox) -> None:
        super().__init__(board, work)
        self.packets: PacketContext | None = None  # None before they start
        self.iterator: Any = None  # torch's; None if there is none any more
        self.session = 0  # what they read; 0 before they are started
        self.left = False
        self._mailbox = mailbox
        self._pids = mailbox.pids
        self._turn = threading.Lock()

    @property
    def _processes(self) -> Sequence[BaseProcess]:
        return () if self.packets is None else self.packets.processes

    @property
    def workers(self) -> list[int]:
        return [number for number, process in enumerate(self._processes) if self._pids[number] == process.pid]

    @property
    def missing(self) -> list[int]:
        return sorted({*range(len(self._pids))} - {*self.workers})

    def is_stopped(self, worker: int) -> bool:
        return state_of(int(self._pids[worker])) in (b"T", b"t")

    def died(self, *, or_ended: bool = False) -> dict[int, str]:
        """Who died and how, else (`or_ended`) who ended; -1 is one that was starting."""
        ended = {n: code for n, process in enumerate(self._processes) if (code := process.exitcode) is not None}
        died = {
            n: code
            for n, code in ended.items()
            if code not in (0, UNKNOWN_EXIT) or not self._mailbox.may_exit(self.session, n)
        }
        come = self.workers
        started = sum(process.pid is not None for process in self._processes)
        found = {-1: "a worker died"} if started < len(self._pids) else {}
        for n, code in (died or (ended if or_ended else {})).items():
            who = f"worker {n}" if n in come else "a worker"
            found[n if n in come else -1] = f"{who} (pid {self._processes[n].pid}) {_describe(code)}"
        return found

    @property
    def has_ended(self) -> bool:
        """Whether one of them was started and has ended."""
        return any(process.exitcode is not None for process in self._processes)

    def advice(self, died: Iterable[int], method: str) -> str:
        """What may have ended workers, and what to do about it."""
        codes = [code for process in self._processes if (code := process.exitcode)]
        if -1 in died and method != "fork" and not (codes and min(codes) < 0):
            return _advice_for_start(method)
        if UNKNOWN_EXIT in codes:
            return "A handler of SIGCHLD or a waitpid(-1) of the program took its exit status; its stderr may tell more"
        if self.board.interrupted.any():
            return "A stream in it raised KeyboardInterrupt, which ends a worker; raise an Exception instead"
        if not codes or min(codes) > 0:
            return "Something in it called sys.exit or os._exit; what it wrote to stderr may tell what"
        if sent := {-code for code in codes} & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}:
            name = signal.Signals(min(sent)).name
            return f"{name} was sent to it, maybe to the whole process group; a handler in worker_init_fn may ignore it"
        if -signal.SIGKILL in codes or -signal.SIGBUS in codes:
            return "If it was out of memory, use fewer workers, a smaller prefetch_factor or smaller items"
        return "If nobody sent it that signal, a library crashed: faulthandler.enable() in worker_init_fn shows where"

    def kill(self) -> None:
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                process.kill()

    def leave(self) -> None:
        """End the workers, and wait for that: not longer than for one that hangs."""
        self.left = True
        if self.iterator is not None:
            thread = threading.Thread(target=self._leave, name="stream-farewell", daemon=True)
            thread.start()
            try:
                thread.join(_FAREWELL_SECONDS)
            finally:
                if thread.is_alive():  # one hangs, or the wait was interrupted
                    self.kill()
            thread.join()

    def _leave(self) -> None:
        with self._turn:
            if self.packets is not None and self.iterator is not None:
                shut_down(self.iterator)
                self.packets.forget()
                self.iterator = None


def _advice_for_start(method: str) -> str:
    script = main_module.read_script()
    others = "workers have to be able to import what the dataset holds; what they wrote to stderr says more"
    if script is None or script.has_guard:
        return f"With {method!r} {others}"
    return (
        f'The script has no `if __name__ == "__main__":`, and workers of the start method {method!r} run it again: put '
        f"there what uses the loader. Otherwise, {others}"
    )


def _describe(exit_code: int) -> str:
    if exit_code == UNKNOWN_EXIT:
        return "ended, how is not known,"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    known = {number.value: number.name for number in signal.Signals}  # most real-time signals have no name
    return f"was killed by {known.get(-exit_code, f'signal {-exit_code}')}"
