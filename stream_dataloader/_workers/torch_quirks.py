"""All that the workers' side touches of torch and of CPython that their documentation does not say.

Each of these may change with a release; `tests/workers/test_torch_quirks.py` has a test for each, which fails against a
torch or a Python that has changed.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import forkserver, process, util
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from stream_dataloader._memory.endings import WeakItems
from stream_dataloader._reading.sessions import is_alive

#: How long torch waits for each worker, one after the other, when one of its iterators goes.
JOIN_SECONDS = 5.0


def iterator_of(dataloader: DataLoader[Any]) -> Iterator[Any]:
    """Torch's iterator, made not to raise workers' deaths in whatever code runs."""
    try:
        with _on_cpu():
            iterator: Any = iter(dataloader)
    except BaseException as error:
        _make_endable(error, dataloader.num_workers)
        raise
    if iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
        _iterators.add(iterator)
    return iterator  # type: ignore[no-any-return]


def _on_cpu() -> AbstractContextManager[object]:
    """Context in which torch draws its workers' seed from a CPU's generator, also if another device is the default.

    Processes that are forked inside keep it. So the default device of workers is the CPU with each start method.
    """
    default = torch.get_default_device()
    return nullcontext() if default.type == "cpu" else torch.device("cpu")


def next_of(iterator: Any) -> Any:
    """Torch's `__next__`, of which half the time goes to a mark for its profiler, if that runs."""
    return next(iterator) if getattr(profiler, "_is_profiler_enabled", True) else iterator._next_data()


def _make_endable(error: BaseException, num_workers: int) -> None:
    """Give an iterator whose start an error interrupted what its `__del__` reads."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is iterator_of.__code__:
            continue  # it has the error among its locals: to read them would make a circle, and the `__del__` late
        if isinstance(unfinished := frame.f_locals.get("self"), _MultiProcessingDataLoaderIter):
            vars(unfinished).setdefault("_shutdown", True)  # else it has started workers
            vars(unfinished).setdefault("_workers_status", [True] * num_workers)


def shut_down(iterator: Any) -> None:
    """End the workers of torch's iterator, whose `__del__` would wait for them in any thread."""
    if (end_workers := getattr(iterator, "_shutdown_workers", None)) is not None:
        end_workers()
        vars(iterator).clear()
        iterator.__class__ = _Gone


class _Gone:
    """What becomes of an iterator of torch's whose workers have ended: it has no `__del__`."""


#: Iterators whose workers are those of this process.
_iterators: WeakItems[Any] = WeakItems()


def _leave_to_parent() -> None:
    """Leave workers to the process that started them: torch and Python would end them."""
    for iterator in _iterators:
        iterator._shutdown = True
        process._children.difference_update(getattr(iterator, "_workers", ()))  # type: ignore[attr-defined]
    _iterators.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


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
