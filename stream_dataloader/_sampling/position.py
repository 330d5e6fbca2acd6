"""`SamplerPosition`: where a `LaneBatchSampler` stands, from one epoch to the next, and as plain data.

Its states are those of a `StreamDataLoader` over the same groups, and either goes on with the other's.

Guarantee: what was set or loaded is used once, by the next epoch; a state says where the trainer is, not how far it has
fetched ahead, if it says how many batches it has used.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from stream_dataloader import _options as options
from stream_dataloader._map_style.index_groups import IndexGroups
from stream_dataloader._ranks.place import OwnRank
from stream_dataloader._sampling.lane_index import LaneIndices
from stream_dataloader._schedule.groups import Groups
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.position import EpochPlace, EpochStart, Position
from stream_dataloader._schedule.replay import Replay
from stream_dataloader._schedule.rules import Rules
from stream_dataloader._schedule.saved_state import (
    SourceIdentity,
    from_plain,
    groups_of,
    missing_groups,
    plain_epoch,
    to_plain,
)
from stream_dataloader._schedule.snapshot import Snapshot
from stream_dataloader._schedule.step_count import count_steps, steps_of_groups
from stream_dataloader.errors import StateError

_KEPT_PLACES = 8  # a block of steps is between one and the next
_ALL = 1 << 62


class SamplerReading:
    """One epoch being drawn, from `start` on, of `total` batches, None without an end; `fetched` were drawn so far.

    Where it stood is known of every batch since it began, however many were drawn ahead: it is replayed, from the
    nearest place that was kept.
    """

    def __init__(self, groups: IndexGroups, rules: Rules, start: EpochStart, total: int | None) -> None:
        self.start = start
        self.total = total
        self.fetched = start.epoch.delivered
        self._groups, self._rules = groups, rules
        self._first_step = (0 if start.place is None else start.place.step) - start.epoch.delivered  # of the epoch
        self._kept: deque[Snapshot] = deque(maxlen=_KEPT_PLACES)

    def batches(self) -> Iterator[LaneIndices]:
        """Draw what is left of the epoch."""
        replay = self._replay(self.start.place)
        lanes, flat = self._rules.lanes, self._groups.flat
        while (left := (_ALL if self.total is None else self.total) - self.fetched) > 0:
            self._kept.append(replay.place())
            places, kinds = replay.read(left)
            size = places[0].size
            all_kinds = kinds.tobytes()
            indices: npt.NDArray[Any] = (places if flat is None else flat[places]).reshape(-1, size)
            for number, row in enumerate(indices.tolist()):
                batch = LaneIndices(row)
                batch.kinds, batch.lanes = all_kinds[number * size : (number + 1) * size], lanes
                self.fetched += 1
                yield batch

    def reached(self) -> Snapshot:
        """Where it stands after all that were drawn."""
        return self.place(self.fetched)

    def place(self, batches: int) -> Snapshot:
        """Where it stood after so many batches of the epoch."""
        number, first = self.start.epoch
        if not first <= batches <= self.fetched:
            raise ValueError(
                f"the state as of step {batches} is not known: {self.fetched} batches of epoch {number} were drawn, "
                f"and the first was number {first}; pass the number of this epoch's batches that the trainer has used, "
                f"from {first} to {self.fetched}"
            )
        step = self._first_step + batches
        before = [place for place in self._kept if place.step <= step]
        replay = self._replay(before[-1] if before else self.start.place)
        replay.skip_to(step)
        return replay.place()

    def _replay(self, place: Snapshot | None) -> Replay:
        lengths = self._groups.lengths
        return Replay(self._rules, Order(self._rules, self.start.run, lengths), lengths, place)


class SamplerPosition:
    """Where a sampler stands.

    Args:
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
        self._groups, self._total_groups, self._rank = groups, total_groups, OwnRank(*given)
        self._position = Position(length)
        self._seed_is_given = seed_is_given
        self._rules = rules
        self._reading: SamplerReading | None = None  # the epoch that began last
        self._steps: tuple[Rules, int, int] | None = None  # of the epoch that was asked for last
        self.find_rank()

    def find_rank(self) -> Rules:
        """The rules of this rank, which may be known only now.

        Raises:
            ValueError: Ranks or lanes cannot share the groups evenly, or ranks might have seeds that differ.
        """
        return self._find_groups(self._total_groups)

    def _find_groups(self, total: int | None) -> Rules:
        place = self._rank.now()
        world_size = place.world_size
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
        self._position.set_epoch(options.integer("epoch", epoch, 0, 2**62))

    def begin(self) -> SamplerReading:
        """The coming epoch begins, and what was set or loaded is used."""
        rules = self.find_rank()
        if (text := self._position.renaming("sampler")) is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        start = self._position.coming()
        reading = SamplerReading(self._groups, rules, start, self._total(start.run))
        self._position.begin(0 if start.place is None else start.place.step, reading.reached)
        self._reading = reading
        return reading

    def total(self) -> int | None:
        """Number of batches of the epoch that began last, or, if none did or another was set, of the one that comes."""
        self.find_rank()
        if self._reading is not None and not self._position.is_set:
            return self._reading.total  # also when all was drawn: the trainer may have batches of it to come
        return self._total(self._position.coming().run)

    def _total(self, run: int) -> int | None:
        if self._position.length is not None or self._rules.padding_mode == "cycle":
            return self._position.length
        if self._steps is None or self._steps[:2] != (self._rules, run):
            steps = steps_of_groups(self._rules, run, self._groups.lengths)
            self._steps = self._rules, run, count_steps(self._rules, steps)
        return self._steps[2]

    # states -----------------------------------------------------------------------------------------------------------

    def state_dict(self, step: int | None) -> dict[str, Any]:
        """See `LaneBatchSampler.state_dict`."""
        self.find_rank()
        if step is not None:
            step = options.integer("step", step, 0)
        reading = self._reading
        if reading is None or self._position.was_left:
            coming = self._position.coming()
            if step not in (None, coming.epoch.delivered):
                raise ValueError(
                    f"the state as of step {step} is not known: epoch {coming.epoch.number} has not begun, and begins "
                    f"at step {coming.epoch.delivered}"
                )
            return self._plain(coming)
        run, _, (number, _) = reading.start
        batches = reading.fetched if step is None else step
        place = reading.place(batches)
        if batches != reading.total:
            return self._plain(EpochStart(run, place, EpochPlace(number, batches)))
        if self._position.length is None:
            return self._plain(EpochStart(run + 1, None, EpochPlace(run + 1, 0)))
        return self._plain(EpochStart(run, place, EpochPlace(number + 1, 0)))

    def _plain(self, start: EpochStart) -> dict[str, Any]:
        rules, length = self._rules, self._position.length
        state = to_plain(rules, start.run, start.place, self._identity(), [()] * rules.groups.count)
        return state if length is None else state | plain_epoch(start.epoch, length)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LaneBatchSampler.load_state_dict`."""
        self.find_rank()
        total, place = groups_of(state), self._rank.now()
        try:
            groups = Groups.of_rank(total, place.rank, place.world_size)
        except ValueError as error:
            raise StateError(f"the state cannot be loaded here: {error}") from None
        loaded = from_plain(self._with_own(state, groups), replace(self._rules, groups=groups), self._identity())
        self._total_groups, self._seed_is_given = total, True
        self._rules = replace(self._rules, seed=loaded.seed)
        rules = self._find_groups(total)
        run, snapshot = loaded.epoch, loaded.snapshot
        has_end = self._position.length is None and rules.padding_mode != "cycle"
        if has_end and snapshot is not None and snapshot.step >= (self._total(run) or 0):  # behind the last batch
            run, snapshot = run + 1, None
        self._position.load(run, snapshot, loaded.epoch_place)
        self._reading = None

    def _with_own(self, state: Mapping[str, Any], groups: Groups) -> Mapping[str, Any]:
        """A state with the places of this rank's groups, which follow from the number of batches."""
        if not missing_groups(state, groups) or not {"seed", "epoch", "step"} <= state.keys():
            return state
        rules, lengths = replace(self._rules, groups=groups, seed=state["seed"]), self._groups.lengths
        place = None
        if state["step"]:
            replay = Replay(rules, Order(rules, state["epoch"], lengths), lengths)
            replay.skip_to(state["step"])
            place = replay.place()
        return {**to_plain(rules, state["epoch"], place, self._identity(), [()] * groups.count), **state}

    def _identity(self) -> SourceIdentity:
        lengths = hashlib.blake2b(self._groups.lengths.tobytes(), digest_size=16).hexdigest()
        return SourceIdentity(self._groups.fingerprint, lengths)
