"""The ranks that share a loader's epochs: they begin an epoch together, and agree on its end."""

from __future__ import annotations

import dataclasses
import json
import operator
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch.distributed as dist

from stream_dataloader._engine import options
from stream_dataloader._engine.ranks.agreement import AgreedSteps, Steps
from stream_dataloader._engine.ranks.own_rank import OwnRank, RankInfo, is_started
from stream_dataloader._engine.ranks.rendezvous import Rendezvous
from stream_dataloader._engine.schedule.mix import Replaced
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.rules import Groups
from stream_dataloader._engine.schedule.saved_state import LoadedState, common, from_plain, groups_in, key_of
from stream_dataloader._engine.schedule.state_match import SourceIdentity, groups_of, sizes_in
from stream_dataloader._engine.workers.torch_quirks import default_store
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StateError


class Ranks:
    """The ranks that share a loader's epochs; arguments as in `StreamDataLoader`."""

    def __init__(
        self,
        dataset: StreamDataset,
        timeout: float,
        groups: int | None,
        rank: int | None,
        world_size: int | None,
        process_group: Any,
    ) -> None:
        options.check_ranks(groups, None, None, None)
        self._own = OwnRank(rank, world_size, process_group)
        self._given = dataset
        self._timeout = timeout
        self._groups = groups
        self._seed = dataset._rules.seed
        self._info = RankInfo()
        #: The dataset as this rank reads it, under the rules of its groups.
        self.dataset = dataset._under(dataset._rules)

    @property
    def alone(self) -> bool:
        return self._info.world_size == 1

    @property
    def rank(self) -> int:
        """The rank's number, as it was found last."""
        return self._info.rank

    def find_rank(self, past: tuple[Replaced, ...] = ()) -> bool:
        """Find the rank of this process; return whether that changes its part of the data.

        Args:
            past: Earlier weights of the coming epoch, see `Mix`.
        """
        info = self._info = self._own.now()
        groups = Groups.of_rank(self._groups or info.world_size, info.rank, info.world_size)
        rules, before = dataclasses.replace(self._given._rules, groups=groups, seed=self._seed), self.dataset._rules
        if (rules := rules.with_past(past)) == before:
            return False
        options.check_groups(rules)
        self.dataset = self._given._under(rules)
        return before.mix is None or rules.with_past(before.mix.past) != before

    def dataset_by(self, past: tuple[Replaced, ...]) -> StreamDataset:
        """Return what is read in an epoch that began with other weights."""
        rules = self.dataset._rules.with_past(past)
        return self.dataset if rules == self.dataset._rules else self.dataset._under(rules)

    def load(self, state: Any, changes: Collection[str] = (), dataset: StreamDataset | None = None) -> LoadedState:
        """Read this rank's part of a state; the next `find_rank` adopts the state's seed and virtual ranks.

        Args:
            changes: Options that the user changed on purpose.
            dataset: The dataset that the state is for; None means the one that was given.
        """
        dataset = dataset or self._given
        total, info = groups_of(state), self._own.now()
        try:
            groups = Groups.of_rank(total, info.rank, info.world_size)
        except ValueError as error:
            raise StateError(f"the state cannot be loaded here: {error}") from None
        identity = identity_of(dataset, sizes_in(state) if "sources" in changes else None)
        loaded = from_plain(state, dataclasses.replace(dataset._rules, groups=groups), identity, changes)
        self._seed, self._groups = loaded.seed, total
        return loaded

    @property
    def agree_on_growth(self) -> bool:
        """Whether ranks must agree on the draw from which on a longer list holds."""
        rules = self.dataset._rules
        return rules.groups.count < rules.groups.total and (rules.padding_mode == "cycle" or rules.mix is not None)

    @property
    def why_not_grown(self) -> str | None:
        """Why an epoch cannot go on with a longer list; None if it can."""
        if not self.agree_on_growth or (is_started() and not self._info.among_others):
            return None
        where = 'with padding_mode="cycle"' if self.dataset._rules.mix is None else "in an interleaved dataset"
        what = f"{where} ranks must agree on the draw from which on new sources come, which needs torch.distributed"
        how = "start it, and let loaders find their ranks"
        return f'{what}; {how}, or merge all ranks\' states, and load them with changes=["sources"]'

    def with_draws_of_all(self, state: Mapping[str, Any], longer: str) -> Mapping[str, Any]:
        """Return a rank's state with the number of draws of all groups, which ranks tell each other if need be.

        Args:
            longer: The fingerprint of the longer list.

        Raises:
            RankError: A rank is at another place, has another list, or does not come.
        """
        if not self.agree_on_growth:
            return state
        drawn = {key_of(group): state[key_of(group)][1] for group in groups_in(state)}
        terms = common(state) | {"sources after extend": longer}
        rendezvous, told = self._meet(terms, json.dumps(drawn), "extend the dataset")
        rendezvous.close()
        others: dict[str, int] = {}
        for own in told:
            others |= json.loads(own)
        return {**{name: ((), count) for name, count in others.items()}, **state}

    def resumed(self, place: Place) -> Place:
        """Return the place to go on from after a saved one: the next epoch's beginning if that was the last batch."""
        if not place.step or not self.dataset._rules.deterministic or place.has_changed:
            return place
        dataset = self.dataset_by(place.past)
        lists = dataset._source_lists
        if not lists.knows_lengths:  # the sources that are left may have items, or none
            return place
        rules = dataset._rules
        shares = [rules.draws_of(group * rules.lanes_of_a_group) for group in range(rules.groups.count)]
        left = sum(max(0, share - cursor) for share, cursor in zip(shares, place.cursors, strict=True))
        if rules.padding_mode != "drop" and left > lists.most_empty:  # some sources with items are left
            return place
        try:
            count = dataset._steps_of(place.epoch)
        except TypeError:  # there is no end
            return place
        return Place(place.epoch + 1) if place.step >= count else place

    def begin(self, epoch: int, step: int, terms: Mapping[str, Any], *, changed: bool) -> Steps:
        """Begin an epoch with all other ranks, which must have the same terms.

        Args:
            changed: The epoch began under other options, so its length depends on the places of all groups.
        """
        rules = self.dataset._rules
        if self.alone:
            return Steps()
        count = None if changed else _count(self.dataset, epoch, step)
        is_decided = count is not None or rules.padding_mode == "cycle"
        if not is_started():
            if not is_decided:
                warnings.warn(
                    "ranks cannot agree on the number of steps without torch.distributed; start it, or pass lengths=, "
                    "with which on_error must not skip streams",
                    stacklevel=5,
                )
            return Steps(count)
        if self._info.among_others:
            if not is_decided:
                raise ValueError(
                    f"world_size is {self._info.world_size}, and torch.distributed has {dist.get_world_size()} "
                    "processes: it is not known which of them share the epoch and must agree on the number of batches. "
                    "Pass process_group=, the group of these processes, instead of rank= and world_size=; or pass "
                    "lengths="
                )
            return Steps(count)
        rendezvous, _ = self._meet({"batch_size": rules.lanes, **terms, "number of batches": count})
        if not is_decided:
            return AgreedSteps(rendezvous, every=rules.padding_mode == "drop", step=step)
        rendezvous.close()
        return Steps(count)

    def _meet(self, terms: Mapping[str, Any], told: str = "", *purpose: str) -> tuple[Rendezvous, list[str]]:
        """Meet all other ranks, see `Rendezvous.begin`."""
        store = default_store()
        rendezvous = Rendezvous(self._info, store, self._timeout or store.timeout.total_seconds(), *purpose)
        try:
            return rendezvous, rendezvous.begin(terms, told)
        except BaseException:
            rendezvous.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_info": RankInfo()}


def identity_of(dataset: StreamDataset, sizes: Sequence[int] | None = None) -> SourceIdentity:
    """Return the identity of a dataset's sources, or of those that it had with these sizes, see `sizes_in`."""
    lists, cuts = dataset._source_lists, dataset._cuts
    if sizes is not None:
        whole = (dataset._rules.num_sources,) if lists.mix is None else lists.mix.sizes
        if len(sizes) == len(whole) and tuple(sizes) != whole and all(map(operator.le, sizes, whole)):
            begins = accumulate(whole, initial=0)
            ends = [begin + size for begin, size in zip(begins, sizes, strict=False)]
            counts = ends if cuts is None else [cuts.source(end) for end in ends]
            lists = lists.beginning([count - start for count, start in zip(counts, lists.starts, strict=True)])
    return SourceIdentity(lists.fingerprint, lists.lengths_fingerprint, lists.described_sections)


def known_count(dataset: StreamDataset, epoch: int, place: Place | None = None) -> int | None:
    """Return `StreamDataset._steps_of`; None if it is not known, or if a stream may change it."""
    if not dataset._rules.deterministic or dataset.on_error != "raise":  # a skipped stream changes the number
        return None
    try:
        return dataset._steps_of(epoch, place)
    except TypeError:  # lengths are not known, or there is no end
        return None


def _count(dataset: StreamDataset, epoch: int, step: int) -> int | None:
    """Return the epoch's number of steps if it is known and suffices for all ranks; None otherwise."""
    count = known_count(dataset, epoch)
    if count is None:
        return None
    rules, steps = dataset._rules, dataset._steps_of_groups(epoch)
    of_ranks = [max(steps[i : i + rules.groups.count]) for i in range(0, len(steps), rules.groups.count)]
    if is_started() and rules.padding_mode != "drop" and min(of_ranks) <= step < count:
        return None  # a rank that reads nothing more must ask others for the layout of items
    return count
