"""`serve`: the loop of a reader in a worker, the same in a process and in a thread.

Guarantees: a part that cannot be pickled becomes an error at its own step; earlier parts arrive. Streams are closed in
the thread that opened them, before `ENDED` is sent.
"""

from __future__ import annotations

import itertools
import pickle
import time as clock
from collections.abc import Callable, Sized
from typing import Any

from stream_dataloader._engine.assembly.part import MESSAGE_BYTES, Contents, Fault, Part, pack
from stream_dataloader._engine.assembly.slots import MOST_STEPS_A_MESSAGE
from stream_dataloader._engine.reading.opening import text_of
from stream_dataloader._engine.reading.reader import PartReader, unsendable
from stream_dataloader._engine.workers.channel import CLOSE, ENDED, EXIT, FAILED, PARTS, Begin, Port
from stream_dataloader.errors import ErrorReport, WorkerError, can_be_sent

_SHORT_SECONDS, _LONG_SECONDS = 2e-3, 8e-3  # bounds of the time to fill a message

#: Begins to read a session.
Enter = Callable[[Begin], PartReader]
#: The most steps in a message with parts like these.
Most = Callable[[list[Part]], int]
#: Pickles a message for another process.
Dumps = Callable[[Any], Sized]


def serve(port: Port, enter: Enter, most_steps: Most, dumps: Dumps | None) -> None:
    """Read sessions for the loader, one after the other.

    ::

                   Begin                 all steps were read up to the limit
        idle ---------------> reading -------------------------------> waiting
         ^  |                 | | ^                                       | |
         |  | EXIT            | | +------------ CREDIT: a new limit ------+ |
         |  v                 | | end of the epoch, or an error             |
         | (return)           | v                                           |
         |                    | done                                        |
         | ENDED      CLOSE   v v                                    CLOSE  v
         +--------------------- streams are closed <------------------------+

    All readers have the same limit, so a reader that waits for another's requests knows that the other one will get
    there. A reader that is done stays in its session until the session is closed: if it left, others would take that
    for the end of the session. In a process, errors that are not an `Exception`, such as `SystemExit`, pass through.

    Args:
        dumps: Pickles parts, which go to another process; None sends them as they are.
    """
    while (begin := port.receive()) != EXIT:
        if not isinstance(begin, Begin):  # a late message of a session that has ended
            continue
        reader: PartReader | None = None
        closed = False
        try:
            try:
                reader = enter(begin)
                closed = _read(port, reader, begin.limit, most_steps, dumps)
            except BaseException as error:
                if dumps is not None and not isinstance(error, Exception):
                    raise
                port.send((FAILED, error if dumps is None else ErrorReport(error)))  # type: ignore[arg-type]
            while not closed:
                order = port.receive()
                closed = order == CLOSE
                if order == EXIT:
                    return
        finally:
            if reader is not None:
                reader.close()
        del begin, reader
        port.send((ENDED,))


def error_of_init(error: Exception, *, is_sent: bool) -> Exception:
    """Return the error to raise for one that `worker_init_fn` raised: the same, unless it would be lost on its way.

    Args:
        is_sent: Whether it goes to another process.
    """
    # A StopIteration that is raised from `__next__` would look like the end of an epoch.
    if not isinstance(error, StopIteration) and (can_be_sent(error) or not is_sent):
        return error
    told = WorkerError(f"worker_init_fn raised {text_of(error)}")
    told.__cause__ = error
    return told


def _read(port: Port, reader: PartReader, limit: int, most_steps: Most, dumps: Dumps | None) -> bool:
    """Read a session to its end; return True if it was closed before that."""
    steps = 1  # wanted in a message
    while not reader.ended:
        while port.has_mail() or reader.step >= limit:
            limit = port.receive()
            if limit < 0:
                return True
        begin, count = clock.monotonic(), min(steps, limit - reader.step)
        parts = list(itertools.islice(reader, count))
        if not parts:
            break
        message: Any = (PARTS, parts, 1)
        if dumps is not None:
            message = message_of(parts, steps, reader.reader.worker_id, dumps)
            seconds = (clock.monotonic() - begin) * steps / len(parts)
            most = min(most_steps(parts), MESSAGE_BYTES * len(parts) // (len(message) + 1))
            steps = steps_of_next(steps, seconds, most)
        if not port.send(message):
            break  # CLOSE has come
    return False


def steps_of_next(steps: int, seconds: float, most: int) -> int:
    """Return the number of steps in the next message, at most `most`."""
    if seconds < _SHORT_SECONDS:
        steps *= 2
    elif seconds > _LONG_SECONDS:
        steps //= 2
    return max(1, min(steps, most, MOST_STEPS_A_MESSAGE))


def message_of(parts: list[Part], wish: int, worker_id: int, dumps: Dumps) -> Sized:
    """Pickle parts. If one cannot be pickled, send those before it, and its error.

    Args:
        wish: Number of steps that the worker would put into a message; the loader gives credit accordingly.
    """
    packed = pack(parts)
    if Part not in map(type, packed):
        return pickle.dumps((PARTS, packed, wish))
    try:
        return dumps((PARTS, packed, wish))
    except Exception:
        return dumps((PARTS, [_sendable(part, worker_id, dumps) for part in parts], wish))


def _sendable(part: Part, worker_id: int, dumps: Dumps) -> Part:
    """Return a part, or the error that it cannot be pickled."""
    try:
        dumps(part)
    except Exception as error:
        runs = part.contents.runs
        fault = Fault(runs[0] if runs else 0, True, ErrorReport(unsendable(part, worker_id, error)))
        return part._replace(contents=Contents(runs=runs), faults=[fault])
    return part
