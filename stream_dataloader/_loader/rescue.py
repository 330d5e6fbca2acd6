"""Continues after a worker died: with new workers, from the last batch that was delivered.

A source is blamed once three workers died while they read it at the same logical time, or opened it. Two are no proof:
a new worker goes to the very place where the one before was, and may spend most of its time there, so one that is
killed from outside is often in the same place. After a first death no stream is opened early, so that a death names one
source. If a worker has several threads, each death names one of each. After the second at one place they take turns, so
that the third names one.

Guarantee: a source that kills its worker each time costs two restarts, and is named with the third death.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from stream_dataloader._loader.epoch import Record
from stream_dataloader._reading.plan import Recovery
from stream_dataloader._workers.feed import Assignment, Feed
from stream_dataloader.errors import WorkerDeathError, shorten

_PROOF = 3  # deaths at one place

_log = logging.getLogger("stream_dataloader")


class Rescue:
    """Restarts the workers of one epoch.

    Args:
        begin: Begins to read again, from a record of what was delivered.
        work: What is read.
        most: How many restarts there may be.
    """

    def __init__(self, begin: Callable[[Record, Recovery], Feed | None], work: Assignment, most: int) -> None:
        self._begin = begin
        self._work = work
        self._most = most
        self._restarts = 0
        self._deaths: Counter[tuple[int, int, int]] = Counter()  # by suspect, which is a member's
        self._killers: dict[tuple[int, int], int] = {}

    def begin_epoch(self) -> None:
        """Resets the number of restarts; keeps the suspects."""
        self._restarts = 0

    def restart(self, death: WorkerDeathError, record: Record) -> Feed | None:
        """Start workers that go on from a record; None if there were too many deaths already.

        Raises:
            WorkerDeathError: A source is to blame, and is not to be skipped.
        """
        member, dataset = death.member, self._work.members[death.member]
        suspects = {(member, *suspect) for suspect in death.suspects}
        self._deaths.update(suspects)
        proven = {(of, source): time for of, source, time in suspects if self._deaths[of, source, time] >= _PROOF}
        unknown = proven.keys() - self._killers.keys()
        if unknown:
            named = ", ".join(f"{index} ({shorten(dataset.sources[index], 80)})" for _, index in sorted(unknown))
            if dataset.on_error == "raise":
                raise WorkerDeathError(
                    f"source {named} killed its worker {_PROOF} times, each time at the same place; leave it out, or "
                    f'pass on_error="skip": {death}',
                    death.suspects,
                    member,
                ) from death
            _log.warning("source %s killed its worker %d times and is skipped", named, _PROOF)
            self._killers |= proven
        elif self._restarts >= self._most:
            return None
        # as many suspects as a worker has threads may be in the same place as before, and one of them is the killer
        one_by_one = self._work.settings.threads_per_worker > 1 and any(
            self._deaths[suspect] == _PROOF - 1 for suspect in suspects
        )
        self._restarts += 1
        self._work.tally.counts["restarts"] += 1
        _log.warning("%s; restart %d of %d, at step %d", str(death), self._restarts, self._most, record.step)
        return self._begin(record, Recovery(self._killers, cautious=True, one_by_one=one_by_one))
