"""Worker processes: what they inherit, and how they and the main process learn of each other's end.

- Ctrl-C is for the main process, which ends the workers: they start with SIGINT blocked.
- A worker whose main process died ends itself, also if it is stuck in user code.
- torch raises a worker's death from a signal handler, in whatever user code is running. Here the loader's `next` raises
  one of its own, and nothing else does.
- torch takes a worker that exits with status 0 for one that is done, and looks again after seconds. Here a worker says
  when it is done; one that exits before is a death like any other.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from stream_dataloader._memory import main_module
from stream_dataloader._memory.interrupts import interrupts_held
from stream_dataloader._memory.pickling import ByValue, note_fork
from stream_dataloader._workers.mailbox import Mailbox
from stream_dataloader._workers.torch_quirks import JOIN_SECONDS, guard_handler

_WATCH_SECONDS = 1.0
_FAREWELL_SECONDS = JOIN_SECONDS - 1.0  # to all workers together; torch would give that to one after the other


def start_method(context: BaseContext | None) -> str:
    """How processes are started."""
    return str((context or multiprocessing).get_start_method())


@contextlib.contextmanager
def starting(method: str) -> Iterator[list[Callable[[], Any]]]:
    """Around the start of workers: Ctrl-C is not for them, and one that dies over it is found when all have started.

    Nor does Ctrl-C come between two halves of a start: what it would have done is in the list that this yields.
    """
    if method == "forkserver":
        preload_forkserver()
    _starting.append(1)
    guard_handler(_is_wanted, _died)
    try:
        with interrupts_held(method) as interrupts:
            yield interrupts
    finally:
        _starting.pop()


def preload_forkserver() -> None:
    """Have the server that workers are forked from import the library, and torch with it, once for all workers.

    Workers would each do so by themselves, which takes seconds. It has no effect on a server that runs already, and the
    user's own list is left as it is. Where it cannot import the library, workers do as ever.
    """
    server: Any = forkserver._forkserver
    if getattr(server, "_preload_modules", None) == ["__main__"]:  # multiprocessing's own
        multiprocessing.set_forkserver_preload(["__main__", "stream_dataloader"])


class WorkerInit:
    """The `worker_init_fn` of the loader's workers; runs the user's own, if there is one.

    Attributes:
        folder: What a worker removes when its main process has been killed; see `shared_folder`.
        forked: Workers are forked from the main process itself.
    """

    def __init__(self, user_init: Callable[[int], Any] | None) -> None:
        self.folder: str | None = None
        self.forked = False
        self._user_init = ByValue(user_init, "worker_init_fn")

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # forkserver does not pass on a blocked one
        if self.forked:
            note_fork()
        watch_parent(self.folder)
        cap_opencv()
        if self._user_init.value is not None:
            self._user_init.value(worker_id)


def cap_opencv() -> None:
    """Keep OpenCV to this thread, as torch keeps itself: workers together are as many as there are cores."""
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # read when it is loaded
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def shared_folder() -> str | None:
    """The folder in which multiprocessing keeps the sockets of this process, and of the workers it starts from now on.

    Each worker would have one of its own, which is left behind when it is killed. None if this process may not be the
    one that made it, and so not the one it ends with.
    """
    global _folder
    known = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if known is None:
        _folder = util.get_temp_dir(), os.getpid()
    return _folder[0] if _folder is not None and _folder[1] == os.getpid() else None


def watch_parent(folder: str | None) -> None:
    """Have this process end soon after the one that started it.

    Args:
        folder: That one's, to be removed if it did not come to it.
    """
    parent, started_by = os.getppid(), multiprocessing.parent_process()

    def watch() -> None:  # a forkserver, the parent of its children, outlives the process that asked for them
        while os.getppid() == parent and (started_by is None or started_by.is_alive()):
            time.sleep(_WATCH_SECONDS)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Crew:
    """The worker processes of one loader, as the main process knows them; built once they are started.

    Args:
        mailbox: Knows the process id of each worker that has come, and which of them are done.
        session: What they read.
        children: The processes; one that is missing, of as many as there are workers, died before it could be seen.

    Attributes:
        children: The processes, by process id.
        waiting: The main thread is inside the loader's `next`.
        casualty: A worker died while it was not; the next `next` raises that.
        watched: `next` finds deaths by itself while it waits, and need not be told from a signal handler.
    """

    def __init__(self, mailbox: Mailbox, session: int, children: Iterable[BaseProcess]) -> None:
        self._mailbox = mailbox
        self._session = session
        self._pids = mailbox.pids
        self.children = {child.pid: child for child in children if child.pid is not None}
        self.waiting = False
        self.casualty = False
        self.watched = False
        _ours.update(self.children)
        _dismissed.difference_update(self.children)  # an id may be given again

    def _number(self, pid: int) -> int:
        """A worker's number, -1 before it has come."""
        found = np.flatnonzero(self._pids == pid)
        return int(found[0]) if len(found) else -1

    @property
    def workers(self) -> list[int]:
        """Those that have come."""
        return sorted(number for pid in self.children if (number := self._number(pid)) >= 0)

    @property
    def missing(self) -> list[int]:
        """Those that have not come."""
        return [number for number, pid in enumerate(self._pids) if pid not in self.children]

    def _ended(self) -> dict[int, int]:
        """The exit codes of those that have ended, by process id."""
        return {pid: code for pid, child in self.children.items() if (code := child.exitcode) is not None}

    def _is_death(self, pid: int, code: int) -> bool:
        """Whether a worker ended otherwise than one that is done."""
        return code != 0 or not self._mailbox.may_exit(self._session, self._number(pid))

    def first_death(self) -> int:
        """The process id of a worker that died, and was not killed on purpose; 0: there is none."""
        ended = self._ended().items()
        return next((pid for pid, code in ended if pid not in _dismissed and self._is_death(pid, code)), 0)

    def died(self, *, or_ended: bool = False) -> dict[int, str]:
        """Who died, -1 for one that was only starting, and how.

        Args:
            or_ended: If nobody did, those that just ended.
        """
        ended = self._ended()
        died = {pid: code for pid, code in ended.items() if self._is_death(pid, code)} or (ended if or_ended else {})
        numbers = {pid: self._number(pid) for pid in died}
        unseen = {-1: "a worker died"} if len(self.children) < len(self._pids) else {}
        return unseen | {
            numbers[pid]: f"{f'worker {n}' if (n := numbers[pid]) >= 0 else 'a worker'} (pid {pid}) {_describe(code)}"
            for pid, code in sorted(died.items(), key=lambda end: numbers[end[0]])
        }

    def advice(self, died: Iterable[int], method: str) -> str:
        """What may have ended workers, and what to do about it.

        Args:
            died: Their numbers, -1 for one that was only starting.
            method: How they were started.
        """
        codes = [code for child in self.children.values() if (code := child.exitcode)]
        if -1 in died and method != "fork" and not (codes and min(codes) < 0):
            return _advice_for_start(method)
        if not codes or min(codes) > 0:
            return "Something in it called sys.exit or os._exit; what it wrote to stderr may tell what"
        if -signal.SIGKILL in codes or -signal.SIGBUS in codes:
            return "If it was out of memory, use fewer workers, a smaller prefetch_factor or smaller items"
        return "If nobody sent it that signal, a library crashed: faulthandler.enable() in worker_init_fn shows where"

    def kill(self) -> None:
        """End all workers at once, whatever they do."""
        for pid, child in self.children.items():
            if child.exitcode is None:
                _dismissed.add(pid)
                child.kill()

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Around torch's farewell to workers, which waits for one after the other: for all, not longer than once."""
        patience = threading.Timer(_FAREWELL_SECONDS, self.kill)
        patience.daemon = True
        patience.start()
        try:
            yield
        finally:
            patience.cancel()


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
    return f"exited with status {exit_code}" if exit_code >= 0 else f"was killed by {signal.Signals(-exit_code).name}"


_folder: tuple[str, int] | None = None  # what `shared_folder` made, and in which process
_starting: list[int] = []  # not empty while workers are being started
_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
_ours: set[int] = set()  # pids of all workers there were
_dismissed: set[int] = set()  # pids of workers that were killed on purpose


def _leave_garbage() -> None:
    """Leave the garbage that a worker was forked with to the main process: iterators of torch's in it end workers."""
    if _starting:
        gc.freeze()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_garbage)


def _is_wanted(pid: int) -> bool:
    """Whether torch may raise a worker's death where it is noticed: of others' workers."""
    return not _starting and pid not in _ours


def _died() -> int:
    """A worker whose death is to be raised where it is noticed, in the loader's `next`; 0: none."""
    for crew in () if _starting else tuple(_crews):  # what has not come to be is looked after once it has
        if not crew.casualty and (pid := crew.first_death()):
            crew.casualty = True
            if crew.waiting and not crew.watched:
                return pid
    return 0


def guard(crew: Crew) -> None:
    """Have deaths in the crew raised by the loader's `next` alone; once torch's own handler is in place."""
    _crews.add(crew)
    guard_handler(_is_wanted, _died)
    crew.casualty = bool(crew.died())
