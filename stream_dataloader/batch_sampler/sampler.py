"""`LaneBatchSampler`: coherent lanes for torch's own `DataLoader`, and for frameworks that build one themselves.

Guarantees: the rows are the same as those of a `StreamDataLoader` over the same groups. All ranks have the same number
of batches, and no index in common. `len` is exact. A state describes the trainer's position.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import Sampler

from stream_dataloader._engine import options
from stream_dataloader._engine.hints import hinted
from stream_dataloader._engine.map_style.given_groups import given_groups
from stream_dataloader._engine.ranks.own_rank import OwnRank
from stream_dataloader._engine.schedule import saved_state, state_match
from stream_dataloader._engine.schedule.anchors import AnchorCut
from stream_dataloader._engine.schedule.epochs import Epochs
from stream_dataloader._engine.schedule.mix import Exhausted, Schedule
from stream_dataloader._engine.schedule.order import Order as SourceOrder
from stream_dataloader._engine.schedule.place import EpochPlace, Place
from stream_dataloader._engine.schedule.replay import Replay, count_steps, steps_of_groups
from stream_dataloader._engine.schedule.rules import Groups, IntArray, PaddingMode, Rules, Windows
from stream_dataloader._engine.schedule.sections import Cut, Cuts, Lengths
from stream_dataloader.anchors import Anchors, check_anchors, lengths_with
from stream_dataloader.batch import StreamBatch
from stream_dataloader.batch_sampler.drawing import Drawing
from stream_dataloader.batch_sampler.members import member_bounds, with_mix
from stream_dataloader.errors import StateError
from stream_dataloader.sectioning import Sections, check_sections, cut_of, described, with_lengths
from stream_dataloader.stream_info import source_key

if TYPE_CHECKING:
    from stream_dataloader._engine.map_style.given_groups import Order
    from stream_dataloader.interleaved import Weights

__all__ = ["LaneBatchSampler"]


@hinted
class LaneBatchSampler(Sampler[list[int]]):
    """Draws the indices of batches in which row b goes on where row b of the batch before stopped.

    A batch is a list of `T * B` indices, time-major: those of all lanes at t = 0, then at t = 1. So the output of
    torch's `DataLoader` has a first axis of `T * B`, to be viewed as `(T, B, ...)`. Each index is a `LaneIndex`, with
    its lane and time step, whether its group starts there, and whether it is padding. Pass the sampler as
    `batch_sampler=`, and no other option about batches.

    A cell without an item cannot be left out of a list of indices. It repeats the index before it in its window; in a
    window without any item, it is the first index of the first group. Its `mask` is False.

    Args:
        batch_size: Number of lanes B on this rank.
        time_steps: Time steps T of a window.
        groups: The group id of each index, numbers or strings; or groups of indices: lists, arrays or ranges. As for
            `StreamDataset.from_map_style`. Either this or `lengths` is required.
        lengths: The number of indices of each group, if groups follow each other.
        windows: `"aligned"` or `"packed"`, as for `StreamDataset`, like the options that follow up to `seed`.
        padding_mode: Behaviour of a lane when no group is left. With `"cycle"` batches never end; pass
            `batches_per_epoch` for trainers that count them.
        shuffle: Draw the groups in a new order each epoch.
        schedule: None, `"longest_first"` or, with `shuffle`, `"balanced"`.
        lookahead: Number of groups that each lane reserves.
        seed: Seeds the order; None draws it from torch's generator. All ranks need the same seed.
        rank: Rank of this process; needs `world_size`. None: ask torch.distributed.
        world_size: Number of ranks.
        virtual_ranks: Number of virtual ranks that the epoch's order is dealt to, see `StreamDataLoader`.
        batches_per_epoch: Number n of batches of an epoch; needs `"cycle"`. The endless run is drawn in epochs of n
            batches, and each epoch goes on where the one before stopped.
        order: Puts scattered ids together: a sort key for each index, or a function of the index.
        dataset_length: Number of items of the dataset, to check the groups; None: the largest index plus 1.
        sections: Cuts groups into shorter ones, as for `StreamDataset`: the most indices of a section, or `Sections`.
        allow_partial: Leave out indices that are in no group, which is an error otherwise.
        allow_repeats: Draw an index once for each group that it is in; several groups are an error otherwise.
        context: Begin each window with the last k indices that its lane drew of the same group before it, as for
            `StreamDataset`. A batch has `(k + T) * B` indices then.
        anchors: Draw only every n-th index of each group: the distance, or `Anchors`. With `shuffle` the first one is
            drawn anew in each epoch. Not together with `sections`.
        members: The number of the dataset that each group is of, for groups of a `ConcatDataset`: `(groups,)` integers
            from 0 on, in order. Each lane then draws its next group from one of these datasets, as with `interleave`.
        weights: One number for each of these datasets, a list of `(draws, weights)`, or a function of the number of
            draws, as for `interleave`, like the two options that follow. None means equal weights.
        weights_by: `"sources"`: weights are shares of the groups drawn; `"steps"`: of their indices.
        exhausted: `"leave_out"` or `"repeat"`: treatment of a dataset once all its groups were drawn.

    Raises:
        ValueError: An option's value is out of range, unknown, or conflicts with another.
        TypeError: An option is of the wrong type.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from stream_dataloader import LaneBatchSampler
        >>> letters = list("abcdefgh")
        >>> sampler = LaneBatchSampler(2, 2, lengths=[3, 2, 3])
        >>> loader = DataLoader(letters, batch_sampler=sampler, collate_fn="".join)
        >>> len(loader), list(loader)
        (3, ['adbe', 'cfcg', 'ahah'])
    """

    #: Frameworks look here for a sampler of single indices, to set its epoch; this sampler counts epochs by itself.
    sampler = None

    def __init__(
        self,
        batch_size: int,
        time_steps: int = 1,
        *,
        groups: Iterable[Any] | None = None,
        lengths: Iterable[int] | None = None,
        windows: Windows = "aligned",
        padding_mode: PaddingMode = "zeros",
        shuffle: bool = False,
        schedule: Schedule | None = None,
        lookahead: int | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        virtual_ranks: int | None = None,
        batches_per_epoch: int | None = None,
        order: Order | None = None,
        sections: Sections | int | None = None,
        dataset_length: int | None = None,
        allow_partial: bool = False,
        allow_repeats: bool = False,
        context: int = 0,
        anchors: Anchors | int | None = None,
        members: Iterable[int] | None = None,
        weights: Weights | None = None,
        weights_by: Literal["sources", "steps"] | None = None,
        exhausted: Exhausted | None = None,
    ) -> None:
        if dataset_length is not None:
            dataset_length = options.integer("dataset_length", dataset_length, 0)
        left_out = {"allow_partial": allow_partial, "allow_repeats": allow_repeats}
        self._groups = given_groups(groups, lengths, dataset_length, order=order, **left_out)
        time_steps = self.time_steps = options.integer("time_steps", time_steps, 1, 2**31)
        self.context = options.check_windows_context(context, time_steps)
        self._seed_is_given = seed is not None  # only a given seed is the same on all ranks
        seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu").item()) if seed is None else seed
        seed = options.integer("seed", seed, 0)
        cut = check_sections(sections, time_steps, shuffle)
        self._anchors = check_anchors(anchors, cut, time_steps, shuffle)
        if self._anchors is not None:
            lengths_with(self._anchors, self._groups.lengths, "groups")
        self._sections = None if cut is None else with_lengths(cut, self._groups.lengths)
        options.flag("shuffle", shuffle)
        mixing = {"weights": weights, "weights_by": weights_by, "exhausted": exhausted}
        self._bounds = member_bounds(members, len(self._groups), **mixing)
        draws = len(self._lengths(seed))
        rules = Rules(
            draws, batch_size, padding_mode, windows, time_steps, 0, shuffle, schedule, seed, deterministic=True
        )
        self._rules = options.check_rules(rules, lookahead, has_lengths=True)
        if members is not None:
            units = [lengths if cut is None else Cuts([cut], 0).lengths(0) for lengths, cut in self._members()]
            self._rules = with_mix(self._rules, units, lookahead, **mixing)
        self.batch_size = self._rules.lanes
        options.check_ranks(virtual_ranks, rank, world_size, None)
        self._total_groups, self._rank = virtual_ranks, OwnRank(rank, world_size)
        self.batches_per_epoch = options.batches_per_epoch(batches_per_epoch, self._rules.padding_mode)
        self._epochs = Epochs(self.batches_per_epoch)
        self._drawing: Drawing | None = None  # the epoch that began last
        self._steps: tuple[Rules, int, int] | None = None  # of the epoch whose length was computed last
        self._find_rank()

    def _members(self) -> Iterator[tuple[IntArray, Cut | None]]:
        """Yield the lengths of each dataset's groups, and how they are cut; None: they are drawn whole."""
        lengths, sections, anchors = self._groups.lengths, self._sections, self._anchors
        for begin, end in pairwise(self._bounds):
            own, key = lengths[begin:end], source_key(self._bounds, begin)
            if anchors is not None:
                yield own, AnchorCut(own, anchors.spacing, begin, key)
            else:
                yield own, None if sections is None else cut_of(sections, own, begin, key)

    def _lengths(self, seed: int) -> Lengths:
        """Return the numbers of items of the units that the schedule hands out: groups, or sections of them."""
        cuts = [cut for _, cut in self._members() if cut is not None]
        return Cuts(cuts, seed) if cuts else self._groups.lengths

    def _find_rank(self) -> Rules:
        """Find this rank, which may be known only now, and return its rules."""
        info = self._rank.now()
        groups = Groups.of_rank(self._total_groups or info.world_size, info.rank, info.world_size)
        rules = replace(self._rules, groups=groups)
        if rules != self._rules:
            options.check_groups(rules)
            if info.world_size > 1 and not self._seed_is_given and rules.shuffle:
                what = f"seed is None, and {info.world_size} ranks would each draw an order of their own"
                raise ValueError(f"{what}; pass the same seed= on all ranks")
            self._rules = rules
        return rules

    def __iter__(self) -> Iterator[list[int]]:
        """Draw the next epoch, which begins with the first `next`."""
        rules = self._find_rank()
        if (text := self._epochs.renaming("sampler")) is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        start = self._epochs.coming()
        total = self._total(start.epoch)
        drawing = self._drawing = Drawing(
            self._groups, self._bounds, rules, self._lengths(rules.seed), start, total, self.context
        )
        self._epochs.begin(drawing.reached)
        yield from drawing.batches()

    def __len__(self) -> int:
        """Return the number of batches of the epoch that began last.

        It is that of the coming epoch if none has begun, or if `set_epoch` was called.

        Raises:
            TypeError: The epoch has no end.
        """
        self._find_rank()
        if self._drawing is not None and self._epochs.wanted is None:
            total = self._drawing.total  # also when all batches were drawn, as the trainer may still use some of them
        else:
            total = self._total(self._epochs.coming().epoch)
        if total is None:
            raise TypeError('padding_mode="cycle" has no last batch, so there is no len(); pass batches_per_epoch=')
        return total

    def _total(self, run: int) -> int | None:
        """Return the number of batches of an epoch; None without an end."""
        if self.batches_per_epoch is not None or self._rules.padding_mode == "cycle":
            return self.batches_per_epoch
        if self._steps is None or self._steps[:2] != (self._rules, run):
            steps = steps_of_groups(self._rules, run, self._lengths(self._rules.seed))
            self._steps = self._rules, run, count_steps(self._rules, steps)
        return self._steps[2]

    def __repr__(self) -> str:
        of = "" if self._rules.mix is None else f" of {len(self._rules.mix.sizes)} datasets"
        return f"{type(self).__name__}({len(self._groups):,} groups{of}, {options.given_options(self._rules)})"

    def __bool__(self) -> bool:
        """Return True; Python would call `len`, which may not be known."""
        return True

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next iteration draws; later iterations count on from it.

        See `StreamDataLoader.set_epoch`.
        """
        self._epochs.set_epoch(options.integer("epoch", epoch, 0, 2**62))

    def state_dict(self, batches: int | StreamBatch | None = None) -> dict[str, Any]:
        """Return the sampler's position as plain data.

        A loader with workers draws batches ahead of those that the trainer has used. `state_dict(batch)` is the state
        after a batch that `collate_lanes` made. `state_dict(n)` is the state after n batches of the epoch, even if more
        were drawn.

        Args:
            batches: The last batch that the trainer has used; or the number of the epoch's batches that it has used,
                including those before a resume. None: all that were drawn.

        Raises:
            ValueError: This batch was not drawn, belongs to another epoch than the one that began last, or the sampler
                was resumed after it.
        """
        self._find_rank()
        if isinstance(batches, StreamBatch):
            batches = self._count_of(batches)
        if batches is not None:
            batches = options.integer("batches", batches, 0)
        drawing = self._drawing
        if drawing is None or self._epochs.was_left:
            coming = self._epochs.coming()
            if batches not in (None, coming.delivered):
                begins = f"epoch {coming.number} begins with batch {coming.delivered}"
                raise ValueError(f"the state after {batches} batches is not known: {begins}, and has not begun yet")
            return self._plain(coming)
        number = drawing.start.number
        batches = drawing.fetched if batches is None else batches
        place = drawing.place(batches)
        if batches != drawing.total:
            return self._plain(place._replace(counted=EpochPlace(number, batches)))
        if self.batches_per_epoch is None:
            return self._plain(Place(place.epoch + 1))
        return self._plain(place._replace(counted=EpochPlace(number + 1, 0)))

    def _count_of(self, batch: StreamBatch) -> int:
        """Return the number of batches that a trainer has used, given the last one."""
        drawing = self._drawing
        if drawing is not None and batch.epoch != (number := drawing.start.number):
            what = f"the batch is batch {batch.batch_index} of epoch {batch.epoch}, and epoch {number} is being drawn"
            raise ValueError(f"{what}; save the state before the next epoch begins")
        return batch.batch_index + 1

    def _plain(self, place: Place) -> dict[str, Any]:
        failures: list[tuple[()]] = [()] * self._rules.groups.count
        length = self.batches_per_epoch
        return saved_state.to_plain(self._rules, place, self._identity, failures, batches_per_epoch=length)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state with the next `iter()`, at the cost of a lookup per lane.

        The sampler adopts the state's seed and virtual ranks. The state of one rank suffices for any number of ranks
        that share its virtual ranks evenly. A state of a `StreamDataLoader` over the same groups
        (`StreamDataset.from_map_style`) can be loaded, too.

        Raises:
            StateError: The state belongs to other groups, to a dataset of another length, or to other options; the
                message says which.
        """
        total, rank = state_match.groups_of(state), self._rank.now()
        try:
            groups = Groups.of_rank(total, rank.rank, rank.world_size)
        except ValueError as error:
            raise StateError(f"the state cannot be loaded here: {error}") from None
        if self._rules.lanes % groups.count:
            what = (
                f"it has {total} virtual ranks, {groups.count} on this rank, which cannot share {self._rules.lanes} "
                "lanes evenly"
            )
            raise StateError(f"the state cannot be loaded here: {what}")
        rules = replace(self._rules, groups=groups)
        loaded = saved_state.from_plain(self._with_own(state, rules), rules, self._identity)
        if loaded.place.has_changed or loaded.place.past:
            raise StateError("options were changed in the state's epoch; load it into a StreamDataLoader")
        self._total_groups, self._seed_is_given = total, True
        self._rules = replace(self._rules, seed=loaded.seed)
        rules = self._find_rank()
        place = loaded.place
        has_end = self.batches_per_epoch is None and rules.padding_mode != "cycle"
        if has_end and place.step and place.step >= (self._total(place.epoch) or 0):  # after the last batch
            place = Place(place.epoch + 1)
        self._epochs.load(place)
        self._drawing = None

    def _with_own(self, state: Mapping[str, Any], rules: Rules) -> Mapping[str, Any]:
        """Add the places of this rank's groups to a state, computed from the number of batches."""
        if not saved_state.missing_groups(state, rules.groups) or not {"seed", "epoch", "step"} <= state.keys():
            return state
        saved_state.check_held(state)  # a damaged step could make the replay below take for ever
        rules, place = replace(rules, seed=state["seed"]), Place(state["epoch"])
        lengths = self._lengths(rules.seed)
        replay = Replay(rules, SourceOrder(rules, place, lengths), lengths, place)
        replay.skip_to(state["step"])
        own = saved_state.to_plain(rules, replay.place(), self._identity, [()] * rules.groups.count)
        return {**own, **state}

    @cached_property
    def _identity(self) -> state_match.SourceIdentity:
        lengths = hashlib.blake2b(self._groups.lengths.tobytes(), digest_size=16).hexdigest()
        cuts = "; ".join(described(cut) for _, cut in self._members() if cut is not None)
        named = self._groups.fingerprint
        if self._rules.mix is not None:  # as `interleave` names its datasets
            parts = [self._groups.part(begin, end) for begin, end in pairwise(self._bounds)]
            named = ", ".join(f"datasets[{number}] {part.fingerprint}" for number, part in enumerate(parts))
        return state_match.SourceIdentity(named, lengths, cuts or None)
