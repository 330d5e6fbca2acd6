"""Undocumented parts of torch and CPython that the workers' side relies on.

Each of these may change with a release; `tests/workers/test_torch_quirks.py` has a test for each, which fails against a
torch or a Python that has changed.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import forkserver, util
from multiprocessing import process as multiprocessing_process
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from stream_dataloader._engine.memory.endings import interrupts_held
from stream_dataloader._engine.reading.session_row import is_alive


def on_cpu() -> AbstractContextManager[object]:
    """Return a context in which the CPU is torch's default device.

    Processes that are forked inside it keep this device. So the default device of workers is the CPU with every start
    method.
    """
    default = torch.get_default_device()
    return nullcontext() if default.type == "cpu" else torch.device("cpu")


def default_store() -> Any:
    """Return the store that torch.distributed was started with."""
    return dist.distributed_c10d._get_default_store()


def bare_store(store: Any) -> Any:
    """Return the store below a store's prefixes."""
    return getattr(store, "_underlying_non_prefix_store", store)


#: Exit code of a child whose own exit code was taken by other code of the program; no process exits with this one.
UNKNOWN_EXIT = 256


def detect_reaping(started: BaseProcess) -> None:
    """Recognize the end of a process even if the program reaps its children: its exit code is then `UNKNOWN_EXIT`.

    A handler of SIGCHLD, `SIG_IGN` or a thread in `waitpid(-1)` takes the exit code away. multiprocessing would then
    consider the process alive for ever, and would send signals to any process that gets its number next.
    """
    popen: Any = getattr(started, "_popen", None)
    # Children of a forkserver are not this process's children, so the program cannot reap them.
    if popen is not None and not isinstance(popen, _ReapAwarePopen) and popen.method != "forkserver":
        popen.__class__ = type("Popen", (_ReapAwarePopen, type(popen)), {})


def forget(ended: BaseProcess) -> None:
    """Prevent that Python code runs when the object of an ended process is collected.

    Python discards errors that are raised there, such as the KeyboardInterrupt of a signal that arrives at that moment.
    multiprocessing runs two callbacks there: it closes its pipe, and removes the process from a set of weak references.
    """
    if (popen := getattr(ended, "_popen", None)) is not None:
        with interrupts_held():  # a close that is interrupted would leave a callback, and the pipe open
            popen.close()
    multiprocessing_process._dangling.discard(ended)  # type: ignore[attr-defined]


class _ReapAwarePopen:
    """Mixin of `multiprocessing`'s handle of a child; every check for the child's end goes through `poll`."""

    returncode: int | None
    pid: int

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        code: int | None = super().poll(flag)  # type: ignore[misc]
        # `returncode` is checked last, as another thread may have reaped the child and set it in the meantime.
        if code is None and _is_no_child(self.pid) and self.returncode is None:
            self.returncode = UNKNOWN_EXIT
        return self.returncode


def _is_no_child(pid: int) -> bool:
    """Return whether a child of this process has ended and was reaped; does not reap it."""
    if not hasattr(os, "waitid"):  # macOS
        return not is_alive(pid)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def preload_forkserver() -> None:
    """Let a new forkserver import the library once, which takes seconds, instead of each worker."""
    server: Any = forkserver._forkserver
    if getattr(server, "_preload_modules", None) == ["__main__"]:  # the default; the user has not set any
        multiprocessing.set_forkserver_preload(["__main__", "stream_dataloader"])


def shared_folder() -> str | None:
    """Return the folder of multiprocessing's sockets, also those of workers; None if another process made it."""
    global _folder
    known = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if known is None:
        _folder = util.get_temp_dir(), os.getpid()
    return _folder[0] if _folder is not None and _folder[1] == os.getpid() else None


_folder: tuple[str, int] | None = None  # the folder that `shared_folder` made, and the process that made it
