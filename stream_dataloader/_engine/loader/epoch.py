"""`Epoch`: one scheduled epoch, with the progress of its delivery.

A run that is read in epochs of n batches is one `Epoch`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stream_dataloader._engine.loader.delivery import Delivery
from stream_dataloader._engine.ranks.agreement import Steps
from stream_dataloader._engine.schedule.epochs import EpochsOfRun
from stream_dataloader._engine.schedule.follower import Follower, LaneReports, PackedPlace
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader.dataset import StreamDataset


class Epoch(Delivery[PackedPlace]):
    """An epoch, or a run, as it is delivered.

    Attributes:
        number: Number of the epoch, or of the run.
        steps: Decides which steps belong to it.
        epochs: The epochs of n batches in which a run is read; None if it is not a run.
        readers: Number of readers that share its lanes.
    """

    def __init__(self, dataset: StreamDataset, start: Place, readers: int) -> None:
        self.dataset, self.number = dataset, start.epoch
        self.steps = Steps()
        self.epochs: EpochsOfRun | None = None
        self.readers = readers
        self._follower = Follower(dataset._rules, start, readers)
        super().__init__(self._follower.last)

    def advance(self, reports: Sequence[LaneReports | None]) -> None:
        """Note that another step was delivered."""
        self._follower.advance(reports)
        self.keep(self._follower.last)

    def pass_over(self, reports: Sequence[LaneReports | None]) -> None:
        """Note what lanes did in a step that makes no batch."""
        # Draws and positions of lanes advance, the number of delivered steps does not.
        self._follower.advance(reports, steps=0)

    def go_back(self) -> Place:
        """Forget what lanes did after the last delivered batch, as new workers read it anew; return the place there."""
        place = self.place(self.last)
        self._follower = Follower(self.dataset._rules, place, self.readers)
        return place

    def place(self, record: PackedPlace) -> Place:
        """Return the place of a record."""
        place = record.unpack()
        return place if self.epochs is None else place._replace(counted=self.epochs.at(place.step))

    @property
    def changed(self) -> Place | None:
        """The current place, if the epoch began under other options; None otherwise."""
        return self.place(self.last) if self.last.base.has_changed else None
