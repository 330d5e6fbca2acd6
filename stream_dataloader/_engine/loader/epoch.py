"""`Epoch`: one scheduled epoch, with the progress of its delivery.

A run that is read in epochs of n batches is one `Epoch`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stream_dataloader._engine.loader.delivery import Delivery
from stream_dataloader._engine.ranks.agreement import Steps
from stream_dataloader._engine.reading.plan import Start
from stream_dataloader._engine.schedule.position import EpochPlace, EpochsOfRun
from stream_dataloader._engine.schedule.snapshot import LaneReports, PackedSnapshot, Progress, Snapshot
from stream_dataloader.dataset import StreamDataset


class Epoch(Delivery[PackedSnapshot]):
    """An epoch, or a run, as it is delivered.

    Attributes:
        number: Number of the epoch, or of the run.
        steps: Decides which steps belong to it.
        epochs: The epochs of n batches in which a run is read; None if it is not a run.
    """

    def __init__(self, dataset: StreamDataset, start: Start, readers: int) -> None:
        self.dataset, self.number = dataset, start.epoch
        self.steps = Steps()
        self.epochs: EpochsOfRun | None = None
        self._progress = Progress(dataset._rules, start.epoch, start.resume, readers)
        super().__init__(self._progress.last)

    def advance(self, reports: Sequence[LaneReports | None]) -> None:
        """Note that another step was delivered."""
        self._progress.advance(reports)
        self.keep(self._progress.last)

    def pass_over(self, reports: Sequence[LaneReports | None]) -> None:
        """Note what lanes did in a step that makes no batch."""
        # Draws and positions of lanes advance, the number of delivered steps does not.
        self._progress.advance(reports, steps=0)

    def place_at(self, step: int) -> EpochPlace | None:
        """Return the place of a step among epochs of n batches; None if this is not a run."""
        return None if self.epochs is None else self.epochs.at(step)

    def start(self, record: PackedSnapshot) -> Start:
        """Return the start for reading on from a record."""
        return Start(self.number, record.unpack(self.dataset._rules) if record.step else None)

    @property
    def changed(self) -> Snapshot | None:
        """The current place, if the epoch began under other options; None otherwise."""
        return self.last.unpack_changed(self.dataset._rules)
