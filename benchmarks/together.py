"""Runs functions at the same time, each in a thread or a process of its own.

Guarantee: what one of them raises, or that it died, is raised here as soon as it is known, and no figure is made of
the others. Programs start threads and processes by this module alone.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

__all__ = ["failing_threads", "in_processes", "in_threads"]

Outcome = TypeVar("Outcome")


def in_threads(tasks: Sequence[Callable[[], Outcome]], barrier: threading.Barrier | None = None) -> list[Outcome]:
    """Return the results of the tasks, in order.

    Args:
        tasks: Each runs in a thread of its own.
        barrier: Where they wait for each other; it is broken if one fails, so that none waits for ever.
    """
    with ThreadPoolExecutor(len(tasks)) as pool:
        futures = [pool.submit(task) for task in tasks]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in done if future.exception() is not None]
        if failed and barrier is not None:
            barrier.abort()
        return [future.result() for future in [*failed, *futures]][len(failed) :]


def in_processes(context: BaseContext, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return a task's result for each argument, in order; each call runs in a process of its own."""
    processes, answers = [], dict[Connection, int]()
    found: list[Any] = [None] * len(arguments)
    try:
        for number, given in enumerate(arguments):
            answer, sender = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(sender, task, given), daemon=True)  # type: ignore[attr-defined]
            process.start()
            processes.append(process)
            sender.close()
            answers[answer] = number
        while answers:
            for ready in wait_for([*answers]):
                assert isinstance(ready, Connection)
                number = answers.pop(ready)
                found[number] = _received(ready, processes[number])
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()
    return found


def _received(answer: Connection, process: Any) -> Any:
    try:
        returned, problem = answer.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process ended with status {process.exitcode} before it had an answer") from None
    if problem:
        raise RuntimeError(f"a process failed\n{problem}")
    return returned


def _answer(sender: Connection, task: Callable[..., Any], given: tuple[Any, ...]) -> None:
    try:
        returned, problem = task(*given), ""
    except BaseException:
        returned, problem = None, traceback.format_exc()
    sender.send((returned, problem))
    sender.close()


@contextmanager
def failing_threads() -> Iterator[None]:
    """Raise what any thread has failed with meanwhile, also those of the packages that are measured."""
    failures: list[BaseException] = []
    told = threading.excepthook

    def note(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None:
            failures.append(failure.exc_value)
        told(failure)

    threading.excepthook = note
    try:
        yield
    finally:
        threading.excepthook = told
    if failures:
        raise RuntimeError(f"a thread failed: {failures[0]!r}") from failures[0]
