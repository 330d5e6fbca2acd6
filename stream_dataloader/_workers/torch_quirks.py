"""All that the workers' side touches of torch and of CPython that their documentation does not say.

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

from stream_dataloader._reading.sessions import is_alive


def on_cpu() -> AbstractContextManager[object]:
    """Context in which the CPU is torch's default device.

    Processes that are forked inside keep it. So the default device of workers is the CPU with each start method.
    """
    default = torch.get_default_device()
    return nullcontext() if default.type == "cpu" else torch.device("cpu")


def default_store() -> Any:
    """The store that torch.distributed was started with."""
    return dist.distributed_c10d._get_default_store()


def bare_store(store: Any) -> Any:
    """What lies below a store's prefixes."""
    return getattr(store, "_underlying_non_prefix_store", store)


#: Exit code of a child whose own one was taken by other code of the program; no process exits with it.
UNKNOWN_EXIT = 256


def heed_reaping(started: BaseProcess) -> None:
    """Have a process end also where the program reaps its children: its exit code is then `UNKNOWN_EXIT`.

    A handler of SIGCHLD, `SIG_IGN` and a thread in `waitpid(-1)` take the exit code away. multiprocessing would take
    the process for alive for good, and would send signals to whatever gets its number next.
    """
    popen: Any = getattr(started, "_popen", None)
    if popen is not None and not isinstance(popen, _Heedful) and popen.method != "forkserver":  # of another's children
        popen.__class__ = type("Popen", (_Heedful, type(popen)), {})


def forget(ended: BaseProcess) -> None:
    """Have no Python code run where the object of a process that has ended goes.

    Python discards what is raised there, such as the KeyboardInterrupt of a signal that arrives at that moment.
    multiprocessing has two callbacks there: it closes its pipe, and takes the process from a set of weak references.
    """
    if (popen := getattr(ended, "_popen", None)) is not None:
        popen.close()
    multiprocessing_process._dangling.discard(ended)  # type: ignore[attr-defined]


class _Heedful:
    """Mixin of `multiprocessing`'s handle of a child; each question for the end goes through `poll`."""

    returncode: int | None
    pid: int

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        code: int | None = super().poll(flag)  # type: ignore[misc]
        if code is None and _is_no_child(self.pid) and self.returncode is None:  # another thread may have learnt it
            self.returncode = UNKNOWN_EXIT
        return self.returncode


def _is_no_child(pid: int) -> bool:
    """Whether a child of this process has ended and was waited for; one that only ended is left as it is."""
    if not hasattr(os, "waitid"):  # macOS
        return not is_alive(pid)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def preload_forkserver() -> None:
    """Have a new server that workers are forked from import the library once, which takes seconds."""
    server: Any = forkserver._forkserver
    if getattr(server, "_preload_modules", None) == ["__main__"]:  # multiprocessing's own
        multiprocessing.set_forkserver_preload(["__main__", "stream_dataloader"])


def shared_folder() -> str | None:
    """Where multiprocessing keeps sockets, of workers too; None if another process may have made it."""
    global _folder
    known = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if known is None:
        _folder = util.get_temp_dir(), os.getpid()
    return _folder[0] if _folder is not None and _folder[1] == os.getpid() else None


_folder: tuple[str, int] | None = None  # what `shared_folder` made, and in which process
