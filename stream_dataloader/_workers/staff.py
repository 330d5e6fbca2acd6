"""A crew of workers, and torch's objects that stand for it: they end, and go, in a thread of their own.

torch ends workers in a `__del__`, which takes seconds if they are busy, and multiprocessing's queues, connections and
processes have finalizers. Python throws away what a signal's handler raises there; in a thread no handler runs.

Guarantee: who waits for the end can be interrupted, and it goes on.
"""

from __future__ import annotations

import threading
from typing import Any

from stream_dataloader._workers import torch_quirks
from stream_dataloader._workers.packets import PacketContext
from stream_dataloader._workers.processes import Crew


class Staff:
    """Workers, and what torch has of them.

    Attributes:
        crew: The workers, once they are started.
        packets: What passes between them and this process.
        iterator: torch's.
        left: Their end has begun.
    """

    def __init__(self) -> None:
        self.crew: Crew | None = None
        self.packets: PacketContext | None = None
        self.iterator: Any = None
        self.left = False
        self._turn = threading.Lock()

    def leave(self) -> None:
        """End the workers, and wait for that: not longer than for one that hangs."""
        self.left = True
        if threading.current_thread() is not threading.main_thread():
            self._leave()
        elif self.iterator is not None:
            thread = threading.Thread(target=self._leave, name="stream-farewell", daemon=True)
            thread.start()
            thread.join()

    def _leave(self) -> None:
        with self._turn:
            if self.crew is None or self.packets is None or self.iterator is None:
                return
            with self.crew.leaving():
                torch_quirks.shut_down(self.iterator)
            self.packets.forget()
            self.iterator = None
