"""Continues after a worker died: with new workers, from the last batch that was delivered.

A source is blamed if workers died twice while reading it at the same logical time, or twice while opening it. After a
first death no stream is opened early, so that a second death names one source. If a worker has several threads, it may
name one of each; then they take turns, and a third death names one. Two kills from outside that hit the same place look
the same; they are as likely as a worker is to be at that place.
"""

from __future__ import annotations

import logging

from stream_dataloader._reading.share import Recovery
from stream_dataloader._schedule.snapshot import PackedSnapshot
from stream_dataloader._workers.feed import Feed
from stream_dataloader._workers.pool import WorkerPool
from stream_dataloader._workers.tally import Tally
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import WorkerDeathError, shorten

_log = logging.getLogger("stream_dataloader")


class Rescue:
    """Restarts the workers of one epoch.

    Args:
        pool: Starts workers.
        dataset: What they read.
        epoch: The epoch's number.
        tally: Where restarts are counted.
        whole_windows: Windows are wanted lane by lane.
        most: How many restarts there may be.
        threads: How many threads a worker has.
    """

    def __init__(
        self,
        pool: WorkerPool,
        dataset: StreamDataset,
        epoch: int,
        tally: Tally,
        *,
        whole_windows: bool,
        most: int,
        threads: int = 1,
    ) -> None:
        self._pool = pool
        self._dataset = dataset
        self._epoch = epoch
        self._tally = tally
        self._whole_windows = whole_windows
        self._most = most
        self._threads = threads
        self._restarts = 0
        self._one_by_one = False
        self._suspects: set[tuple[int, int]] = set()
        self._killers: dict[tuple[int, int], int] = {}

    def begin_epoch(self) -> None:
        """Deaths are counted anew; what was learned from them stays."""
        self._restarts = 0

    def __call__(self, death: WorkerDeathError, record: PackedSnapshot) -> Feed | None:
        """Start workers that go on from a record; None if there were too many deaths already.

        Raises:
            WorkerDeathError: There were two over one source, which is not to be skipped.
        """
        if self._restarts >= self._most:
            return None
        killers = {(0, source): time for source, time in death.suspects & self._suspects}
        self._suspects |= death.suspects
        unknown = killers.keys() - self._killers.keys()
        # as many as threads may be in the same place as before, of which one was the killer
        self._one_by_one = len(unknown) > 1 and self._threads > 1 and not self._one_by_one
        if unknown and not self._one_by_one:
            named = ", ".join(f"{index} ({shorten(self._dataset.sources[index], 80)})" for _, index in sorted(killers))
            if self._dataset.on_error == "raise":
                raise WorkerDeathError(
                    f'source {named} killed its worker twice; leave it out, or pass on_error="skip" (both died at the '
                    f"same place of it, which is taken for no accident; if not, start again): {death}",
                    death.suspects,
                ) from death
            _log.warning("source %s killed its worker twice and is skipped", named)
            self._killers |= killers
        self._restarts += 1
        self._tally.restarts += 1
        _log.warning("%s; restart %d of %d, at step %d", str(death), self._restarts, self._most, record.step)
        return self._pool.start(
            self._epoch,
            whole_windows=self._whole_windows,
            resume=record.unpack(self._dataset.rules),
            recovery=Recovery(self._killers, cautious=True, one_by_one=self._one_by_one),
        )
