"""`SamplerPosition`: where a `LaneBatchSampler` stands, from one epoch to the next, and as plain data.

Its states are those of a `StreamDataLoader` over the same groups, and either goes on with the other's.

Guarantee: what was set or loaded is used once, by the next epoch; a state says where the trainer is, not how far it has
fetched ahead, if it says how many batches it has used.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stream_dataloader import _options as options
from stream_dataloader._map_style.index_groups import IndexGroups
from stream_dataloader._ranks.place import RankPlace, place_now
from stream_dataloader._sampling.reading import EpochStart, SamplerReading
from stream_dataloader._schedule.groups import Groups
from stream_dataloader._schedule.rules import Rules
from stream_dataloader._schedule.saved_state import SourceIdentity, from_plain, groups_of, to_plain
from stream_dataloader._schedule.step_count import count_steps, steps_of_groups
from stream_dataloader._schedule.stretch import StretchPlace, renamed, taken_up
from stream_dataloader.errors import StateError

_BEGINNING = EpochStart(0, None, 0, 0)


class SamplerPosition:
    """Where a sampler stands.

    Args:
        groups: What it draws.
        rules: By which rules, as if there were one rank.
        total_groups: Number of groups that ranks share; None: one a rank.
        given: Rank and world size; both None: torch.distributed is asked.
        length: Number of batches of an epoch that is a stretch of an endless run; None: epochs are scheduled ones.
        seed_is_given: The seed is the user's, and so every rank's.
    """

    def __init__(
        self,
        groups: IndexGroups,
        rules: Rules,
        total_groups: int | None,
        given: tuple[int | None, int | None],
        length: int | None,
        *,
        seed_is_given: bool,
    ) -> None:
        self._groups, self._total_groups, self._given = groups, total_groups, given
        self._length = length
        self._seed_is_given = seed_is_given
        self._rules = rules
        self._place = RankPlace()
        self._reading: SamplerReading | None = None  # the epoch that began last
        self._origin = _BEGINNING  # what comes next, as long as nothing was read since
        self._any_number = False  # the loaded state was of a run that was not read in epochs
        self._wanted: int | None = None  # the number that set_epoch gave the coming epoch
        self._steps: tuple[Rules, int, int] | None = None  # of the epoch that was asked for last
        self.find_rank()

    def find_rank(self) -> Rules:
        """The rules of this rank, which may be known only now.

        Raises:
            ValueError: Ranks or lanes cannot share the groups evenly, or ranks might have seeds that differ.
        """
        self._place = place_now(self._place, *self._given, None)
        return self._find_groups(self._total_groups)

    def _find_groups(self, total: int | None) -> Rules:
        _, world_size, *_ = place = self._place
        groups = Groups.of_rank(total or world_size, place.rank, world_size)
        rules = replace(self._rules, groups=groups)
        if rules != self._rules:
            options.check_groups(rules)
            if world_size > 1 and not self._seed_is_given and (rules.shuffle or rules.schedule == "balanced"):
                raise ValueError(
                    f"seed is None, and there are {world_size} ranks, which would each draw an order of their own; "
                    "pass the same seed= on all ranks"
                )
            self._rules = rules
        return rules

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that comes next."""
        self._wanted = options.integer("epoch", epoch, 0, 2**62)

    def begin(self) -> SamplerReading:
        """The coming epoch begins, and what was set or loaded is used."""
        rules = self.find_rank()
        by_itself, start = self._by_itself(), self._coming()
        differs = start.place is not None and start.number != by_itself.number
        if self._length is not None and differs and not self._any_number:
            warnings.warn(
                renamed(start.number, by_itself.number, self._length, "sampler"),
                RuntimeWarning,
                stacklevel=4,
            )
        self._wanted, self._any_number = None, False
        self._reading = SamplerReading(self._groups, rules, start, self._total(start))
        return self._reading

    def _coming(self) -> EpochStart:
        """What comes next, with the number that was set."""
        coming, wanted = self._by_itself(), self._wanted
        if wanted is None or wanted == coming.number:
            return coming
        if self._length is None:
            return EpochStart(wanted, None, wanted, 0)
        if wanted == 0 and not self._any_number:
            return _BEGINNING
        return coming._replace(number=wanted, delivered=0)

    def _by_itself(self) -> EpochStart:
        """What comes next if no number was set."""
        reading = self._reading
        if reading is None:
            return self._origin
        if reading.fetched == reading.start.delivered and reading.fetched != reading.total:  # nothing came of it
            return reading.start
        return self._behind(reading, reading.fetched)

    def _behind(self, reading: SamplerReading, batches: int) -> EpochStart:
        """The epoch after one of which so many batches were used."""
        run, _, number, _ = reading.start
        if self._length is None:
            return EpochStart(run + 1, None, number + 1, 0)
        return EpochStart(run, reading.place(batches), number + 1, 0)

    def total(self) -> int | None:
        """Number of batches of the epoch that began last, or, if none did or another was set, of the one that comes."""
        self.find_rank()
        # also when all of it was drawn: the trainer may have batches of it to come
        return self._total(self._coming()) if self._reading is None or self._wanted is not None else self._reading.total

    def _total(self, start: EpochStart) -> int | None:
        if self._length is not None or self._rules.padding_mode == "cycle":
            return self._length
        if self._steps is None or self._steps[:2] != (self._rules, start.run):
            steps = steps_of_groups(self._rules, start.run, self._groups.lengths)
            self._steps = self._rules, start.run, count_steps(self._rules, steps)
        return self._steps[2]

    # states -----------------------------------------------------------------------------------------------------------

    def state_dict(self, step: int | None) -> dict[str, Any]:
        """See `LaneBatchSampler.state_dict`."""
        self.find_rank()
        if step is not None:
            step = options.integer("step", step, 0)
        reading, coming = self._reading, self._coming()
        if reading is None or coming != self._by_itself():
            if step not in (None, coming.delivered):
                raise ValueError(
                    f"the state as of step {step} is not known: epoch {coming.number} has not begun, and begins at "
                    f"step {coming.delivered}"
                )
            return self._plain(coming)
        batches = reading.fetched if step is None else step
        place = reading.place(batches)
        if batches == reading.total:
            return self._plain(self._behind(reading, batches))
        return self._plain(reading.start._replace(place=place, delivered=batches))

    def _plain(self, start: EpochStart) -> dict[str, Any]:
        rules = self._rules
        state = to_plain(rules, start.run, start.place, self._identity(), [()] * rules.groups.count)
        if self._length is not None:
            state |= StretchPlace(start.number, start.delivered).plain(self._length)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LaneBatchSampler.load_state_dict`."""
        self.find_rank()
        total = groups_of(state)
        try:
            groups = Groups.of_rank(total, self._place.rank, self._place.world_size)
        except ValueError as error:
            raise StateError(f"the state cannot be loaded here: {error}") from None
        loaded = from_plain(state, replace(self._rules, groups=groups), self._identity())
        self._total_groups, self._seed_is_given = total, True
        self._rules = replace(self._rules, seed=loaded.seed)
        rules = self._find_groups(total)
        place = loaded.snapshot
        run, stretch = loaded.epoch, loaded.stretch
        self._any_number = False
        start = EpochStart(run, place, run, 0 if place is None else place.step)
        if self._length is not None:
            self._any_number = stretch is None and place is not None
            start = EpochStart(run, place, *taken_up(stretch, self._length))
        elif rules.padding_mode != "cycle" and start.delivered >= (self._total(start) or 0):  # behind the last batch
            start = EpochStart(run + 1, None, run + 1, 0)
        self._origin, self._reading, self._wanted = start, None, None

    def _identity(self) -> SourceIdentity:
        lengths = hashlib.blake2b(self._groups.lengths.tobytes(), digest_size=16).hexdigest()
        return SourceIdentity(self._groups.fingerprint, lengths)
