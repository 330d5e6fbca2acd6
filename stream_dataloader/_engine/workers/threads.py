"""A worker that is a thread of this process: it opens, reads and closes its streams itself, and cannot be killed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stream_dataloader._engine.memory.endings import start_thread
from stream_dataloader._engine.reading.reader import PartReader
from stream_dataloader._engine.workers.channel import CLOSE, ENDED, EXIT, FAILED, READY, Begin, Port
from stream_dataloader._engine.workers.seeding import seed_opencv
from stream_dataloader._engine.workers.serve import error_of_init, serve
from stream_dataloader._engine.workers.shared import Shared


def start_worker(number: int, init: Callable[[int], Any] | None, shared: Shared, port: Port) -> None:
    """Start a thread that reads sessions, and sends parts and errors through its port."""
    start_thread(functools.partial(_work, number, init, shared, port), f"stream-worker-{number}")


def _work(number: int, init: Callable[[int], Any] | None, shared: Shared, port: Port) -> None:
    try:
        if init is not None:
            init(number)
    except BaseException as error:
        told = error_of_init(error, is_sent=False) if isinstance(error, Exception) else error
        port.send((FAILED, told))
        while (order := port.receive()) != EXIT:
            if order == CLOSE:
                port.send((ENDED,))
        return
    port.send((READY,))

    def enter(begin: Begin) -> PartReader:
        seed_opencv(begin.seed + number)  # of the generators, only OpenCV's is the thread's own
        return shared.enter(number, port.is_closed, begin)

    serve(port, enter, shared.most_steps, None)
