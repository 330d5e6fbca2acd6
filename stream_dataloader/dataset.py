"""`StreamDataset`: the sources, the function that opens them, and their schedule.

It is a description, and reads nothing: `_engine/reading` follows its `plan`. Iterated over by itself, or by torch's own
`DataLoader`, it yields *parts*, each with the lanes of one process, which `StreamDataLoader` regroups into batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch.utils.data import IterableDataset

from stream_dataloader._engine import options
from stream_dataloader._engine.hints import hinted
from stream_dataloader._engine.items.fill import check_fill
from stream_dataloader._engine.map_style.streams import map_style
from stream_dataloader._engine.memory.pickling import by_value, spawning
from stream_dataloader._engine.reading.growth import ListReaders, as_listed
from stream_dataloader._engine.reading.lists import SourceList, SourceLists
from stream_dataloader._engine.reading.plan import OnError, ReadingPlan
from stream_dataloader._engine.schedule.mix import Schedule
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.replay import count_steps, steps_behind, steps_of_groups
from stream_dataloader._engine.schedule.rules import IntArray, PaddingMode, Rules, Windows
from stream_dataloader._engine.schedule.sections import Cuts, Lengths
from stream_dataloader._engine.torch_dataset.sessions import SessionTable
from stream_dataloader.anchors import Anchors, check_anchors
from stream_dataloader.batch import StreamBatch
from stream_dataloader.protocols import StreamFactory
from stream_dataloader.sectioning import Sections, check_sections
from stream_dataloader.stream_info import get_stream_info

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from stream_dataloader._engine.map_style.given_groups import Order
    from stream_dataloader._engine.map_style.streams import MapStyleOptions

__all__ = ["StreamDataset"]

_BY_VALUE = ("on_error", "fill_value", "retry_on")  # objects of the user, which pickle may not be able to send

_NO_INDICES = (
    "a StreamDataset has no length and no items by index. To split it, split the list of sources, and build a "
    "StreamDataset from each part; to join several: interleave([...]), side_by_side([...])"
)


@hinted
class StreamDataset(IterableDataset[StreamBatch]):
    """Sources, a factory that opens one of them, and the rules for filling the lanes of a batch with their streams.

    Args:
        sources: The list of sources: paths, texts, tuples, anything picklable. It is packed once into memory that all
            workers share. A `range`, or an immutable `Sequence` of your own, is not copied but indexed by the worker
            that reads a source, so it may compute its sources, and be of any length.
        open_stream: `open_stream(source)` returns the stream of one source: an iterable of items in time order, such
            as a generator. See `protocols` for when and where it is called.
        batch_size: Number of lanes B, of all workers together.
        padding_mode: Behaviour of a lane when no source is left. `"zeros"`: pad with `fill_value`.
            `"data"`: read sources again, with `mask` False, until every source has been read once. `"drop"`: the epoch
            ends at the first step with an idle lane. `"cycle"`: never ends; each pass is an epoch of its own.
        fill_value: Padding of cells without an item: a number, or an array that broadcasts to every leaf; or a dict of
            these, nested as items are: `{"label": -100, "boxes": {"x": -1}}`. Leaves that the dict does not name, or
            sets to None, are padded with 0, and objects always with None. It is checked with a stream's first item.
            With a `collate_fn` and without `time_steps` it may be any object: idle lanes pass it to `collate_fn`
            unchanged.
        seed: Seeds the shuffle and the streams' generators, 0 to 2**63 - 1. None draws one from torch's
            generator now, so that `torch.manual_seed` makes a run repeatable.
        time_steps: Time steps T of a window, for streams that yield single time steps: the loader cuts the windows.
            Either this or `windows="given"` is required, unless the loader has a `collate_fn`.
        windows: `"aligned"`: a stream starts at t = 0 of a window, and the rest of its last window is padding.
            `"packed"`: the next stream starts at the very next time step. `"given"`, without `time_steps`: the streams
            yield whole windows, with a leading time axis; shorter ones than a stream's first are padded.
        shuffle: Read the sources in a new order each epoch, seeded from (seed, epoch).
        schedule: None: the order of the list, or shuffled. With `lengths` also `"longest_first"`, which with `shuffle`
            shuffles sources of equal length; or, with `shuffle`, `"balanced"`: a random order in which long sources
            tend to come early.
        deterministic: Assign sources in logical time: batches are the same for any number of workers. False assigns
            them first come, first served, for live sources.
        lookahead: Number of sources that each lane reserves, so that workers do not wait for each other. With 0 a lane
            takes a source only when it needs one. None means 1, or 0 with a `schedule`. Workers open reserved sources
            in a background thread if `open_stream` declares that this is safe (`protocols.OpensEarly`).
        lengths: Number of items of each source, if known: time steps, or windows without `time_steps`. None: asks
            `open_stream`, as for stores (`protocols.KnowsLengths`). Makes `len(loader)` known. A stream of another
            length is then an error.
        on_error: `"raise"`; `"skip"`: the lane continues with its next source; or a callable that gets the
            `StreamError`, in the worker, and returns one of the two; another result is an error. Streams that do not
            fit each other always raise.
        max_failures: The most sources that may be skipped, over all epochs and resumes; one more is an error. A source
            that fails in each epoch counts once. None: any number.
        retries: How often in a row a stream that raises is opened again, at the item it had reached, after 0.1 s,
            0.2 s, ..., 30 s at most. With `deterministic=False`, a stream counts as live if its length is not known and
            it cannot go to an item (no `start=0`, `seek_item` or `state_dict`): it goes on from now, and
            `loader.failures` gets a `GapError`.
        retry_on: The exceptions of the stream or `open_stream` after which it is opened again: a class, or several.
        fingerprint: Identifies the list of sources in saved states; None hashes the list. Pass one if paths may move.
        mark_ends: Mark the last time step of each stream in `batch.is_last`. None: only if `lengths` are known, so that
            nothing is read ahead. True: always. Unless `lengths` tell whether a stream goes on after a window, its
            next item is taken one step ahead. False: never. With a `collate_fn` it has no effect.
        seed_globals: Seed the global generators of `random`, numpy and torch for each stream, from (seed, epoch,
            source), so that a stream's draws from them are the same for any number of workers. It costs up to a
            millisecond for each window, streams are not opened early, and several threads in one process are refused.
        sections: Cuts sources into shorter streams, see `Sections`; a number is the most items of a section. With
            `shuffle` the cuts are drawn anew in each epoch, otherwise they are fixed. None reads sources whole.
        context: Begin each window with the last k items that its lane read of the same stream before it, with `mask`
            False. Windows then have k + T time steps. A lane that begins a stream has padding there.
        anchors: Read only every n-th item of each stream: the distance, or `Anchors`. With `shuffle` the first one is
            drawn anew in each epoch. Needs `lengths`, which stay those of the streams. Not together with `sections`.

    Raises:
        ValueError: An option's value is out of range, unknown, or conflicts with another.
        TypeError: An option is of the wrong type, or a source cannot be pickled.

    Example:
        >>> from stream_dataloader import StreamDataset, StreamDataLoader
        >>> dataset = StreamDataset(["hello", "hi"], lambda text: map(ord, text), batch_size=2, time_steps=3)
        >>> for batch in StreamDataLoader(dataset):
        ...     print(batch.data.T.tolist(), batch.reset.tolist())
        [[104, 101, 108], [104, 105, 0]] [True, True]
        [[108, 111, 0], [0, 0, 0]] [False, False]
    """

    def __init__(
        self,
        sources: Iterable[Any],
        open_stream: StreamFactory,
        batch_size: int,
        padding_mode: PaddingMode = "zeros",
        fill_value: Any = 0,
        seed: int | None = None,
        *,
        time_steps: int | None = None,
        windows: Windows = "aligned",
        shuffle: bool = False,
        schedule: Schedule | None = None,
        deterministic: bool = True,
        lookahead: int | None = None,
        lengths: Sequence[int] | IntArray | None = None,
        on_error: OnError = "raise",
        max_failures: int | None = None,
        retries: int = 0,
        retry_on: type[Exception] | Sequence[type[Exception]] = Exception,
        fingerprint: str | None = None,
        mark_ends: bool | None = None,
        seed_globals: bool = False,
        sections: Sections | int | None = None,
        context: int = 0,
        anchors: Anchors | int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(sources, SourceLists):
            cut = check_sections(sections, time_steps, shuffle)
            chosen = check_anchors(anchors, cut, time_steps, shuffle)
            one = SourceList.checked(sources, open_stream, lengths, cut, fingerprint, chosen)
            sources = SourceLists([one])
        options.check_step_factory(open_stream, time_steps)
        self._list_readers = ListReaders()
        self._source_lists = lists = sources  # `interleave` passes the lists of several datasets
        self._mixed: Callable[[Iterable[SourceList]], SourceLists] | None = None  # how it mixed them
        seed = (
            int(torch.randint(2**62, (), dtype=torch.int64, device="cpu").item())
            if seed is None
            else options.integer("seed", seed, 0)
        )
        self._cuts: Cuts | None = lists.cuts(seed)  # the sections that the schedule hands out in place of sources
        if time_steps is not None:  # without it, `fill_value` may be an idle lane's window, of any type
            check_fill(fill_value)
        self.fill_value = fill_value
        self.on_error = (
            on_error if callable(on_error) else options.choice("on_error", on_error, Literal["raise", "skip"])
        )
        self.max_failures = None if max_failures is None else options.integer("max_failures", max_failures, 0)
        self.retries = options.integer("retries", retries, 0)
        self.retry_on = options.exceptions("retry_on", retry_on)
        self._given_mark_ends = mark_ends
        tells = lists.knows_lengths and time_steps is not None
        self.mark_ends = tells if mark_ends is None else options.flag("mark_ends", mark_ends)
        self.seed_globals = options.flag("seed_globals", seed_globals)
        in_threads = getattr(open_stream, "reads_in_threads", False) is True
        options.check_seed_globals(
            self.seed_globals, "streams.live reads each stream in a thread", in_threads=in_threads
        )
        self._given_lookahead = lookahead
        self.context = options.check_windows_context(context, time_steps, deterministic=deterministic)
        self._steps: tuple[int, list[int]] | None = None  # of the epoch whose length was computed last
        draws = len(self.sources if self._cuts is None else self._cuts)
        rules = Rules(
            draws, batch_size, padding_mode, windows, time_steps, 0, shuffle, schedule, seed, deterministic, lists.mix
        )
        self._rules = options.check_rules(rules, lookahead, has_lengths=lists.lengths is not None)
        self._session_table = SessionTable(self._rules)
        self._iterations = 0  # in this process
        self._epoch_request = (0, 0)  # number of calls of set_epoch, and the last epoch

    @classmethod
    def from_map_style(
        cls,
        dataset: Any,
        groups: Iterable[Any],
        batch_size: int,
        *,
        order: Order | None = None,
        allow_partial: bool = False,
        allow_repeats: bool = False,
        **others: Unpack[MapStyleOptions],
    ) -> Self:
        """Read a map-style dataset: each group of indices is a source, and an item is `dataset[i]`.

        The `time_steps` items of a window are fetched by one call of `dataset.__getitems__`, if it exists. Lengths are
        known, so `len(loader)` is exact, and resuming reads nothing again. The dataset is pickled once for each worker,
        or inherited by fork. `sources[i]` is the i-th group: a `range`, or an array of indices.

        Args:
            dataset: Any dataset with `__getitem__` and `__len__`.
            groups: The group id of each index, numbers or strings: equal ones in a row are a group. Or the groups
                themselves: lists of indices, arrays or ranges.
            batch_size: Number of lanes B.
            order: Puts scattered ids together: a sort key for each index (its time, say), or a function of the index.
                `range(len(dataset))` keeps the order of indices. Groups come in the order of their first index.
            allow_partial: Leave out indices that are in no group, which is an error otherwise.
            allow_repeats: Read an index once for each group that it is in; several groups are an error otherwise.
            **others: The options of `StreamDataset`, except `sources`, `open_stream` and `lengths`.

        Raises:
            ValueError: The groups do not fit the dataset, or as for `StreamDataset`.
            TypeError: It is not a map-style dataset, or as for `StreamDataset`.

        Example:
            >>> from stream_dataloader import StreamDataset, StreamDataLoader
            >>> letters = list("abcdefg")
            >>> words = ["x", "x", "x", "y", "y", "z", "z"]
            >>> dataset = StreamDataset.from_map_style(letters, words, batch_size=2, time_steps=2)
            >>> [batch.data for batch in StreamDataLoader(dataset)]
            [[['a', 'd'], ['b', 'e']], [['c', 'f'], [None, 'g']]]
        """
        made = map_style(dataset, groups, others, order=order, allow_partial=allow_partial, allow_repeats=allow_repeats)
        return cls(batch_size=batch_size, **made)

    def __repr__(self) -> str:
        lists = self._source_lists
        of = f"{len(lists):,} sources"
        if lists.mix is not None:
            return f"{type(self).__name__}({of} of {len(lists.lists)} datasets, {options.given_options(self._rules)})"
        factory = getattr(self.open_stream, "__qualname__", type(self.open_stream).__name__)
        cut = "" if self.sections is None else f", sections={self.sections.max_steps}"
        cut += "" if (chosen := lists.lists[0].anchors) is None else f", anchors={chosen!r}"
        return f"{type(self).__name__}({of}, {factory}, {options.given_options(self._rules)}{cut})"

    def extend(self, sources: Iterable[Any], lengths: Sequence[int] | IntArray | None = None) -> None:
        """Add sources while training runs, such as recordings that have arrived.

        Loaders that read the dataset go on behind the last batch that was delivered: their streams are opened again
        where they stand, by new workers. The new sources come behind those that are left of the epoch; with `"cycle"`
        they join at the next pass, and are shuffled with the others there. A saved state says where that was, so build
        the dataset with the longer list to load it. Any thread may call it.

        Datasets that `interleave` this one have the new sources, too: `batch.source_index` counts over all datasets, so
        those of later ones have higher numbers from then on.

        All ranks call it between the same two batches, with the same sources. In an epoch of `"cycle"` or `interleave`
        they wait for each other, and agree where the sources join. Iterators of torch's own `DataLoader` have a copy of
        the list: there the new sources are read from the next iteration on, which needs new workers.

        Args:
            sources: The sources to add, at least one.
            lengths: The number of items of each, if the dataset knows those of its other sources.

        Raises:
            TypeError: A source cannot be pickled, or the dataset's sources are no list of its own: those of
                `interleave`, whose datasets can be extended, of `from_map_style`, a `range` or another sequence.
            RuntimeError: A stream called it.
            ValueError: Lengths are missing, or given and not known of the others. Or ranks must agree where the sources
                join, without torch.distributed.
            RankError: Another rank is at another batch, adds other sources, or does not call it.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> dataset = StreamDataset(["ab", "cd"], iter, batch_size=1, time_steps=2)
            >>> for batch in StreamDataLoader(dataset):
            ...     print(batch.data)
            ...     if len(dataset.sources) == 2:
            ...         dataset.extend(["ef"])
            [['a'], ['b']]
            [['c'], ['d']]
            [['e'], ['f']]
        """
        if get_stream_info() is not None:
            raise RuntimeError(
                "extend was called by a stream, which may run in a worker, where the dataset is a copy; call it in the "
                "loop over the loader, or in a thread of this process"
            )
        before = self._source_lists
        if before.mix is not None:
            count = len(before.lists)
            raise TypeError(
                f"this dataset interleaves {count}, and sources belong to one of them; extend that one, and this one "
                "has them, too"
            )
        if not (more := as_listed(sources)):
            return
        longer = SourceLists([before.lists[0].longer(more, lengths)])
        with self._list_readers.hold(before, longer) as go_on:
            self._take_up(longer)
            go_on()

    @contextlib.contextmanager
    def _hold(self, before: SourceLists, longer: SourceLists) -> Iterator[Callable[[], None]]:
        """Stand still while a dataset that this one interleaves gets a longer list, see `ListReader`."""
        own = self._source_lists
        (old,), (new,) = before.lists, longer.lists
        assert self._mixed is not None  # a copy, which has none, reads no dataset that could grow
        lists = self._mixed(new if one is old else one for one in own.lists)
        with self._list_readers.hold(own, lists) as readers_go_on:

            def go_on() -> None:
                self._take_up(lists)
                readers_go_on()

            yield go_on

    def _take_up(self, lists: SourceLists) -> None:
        """Have a longer list from now on."""
        self._source_lists, self._cuts = lists, lists.cuts(self._rules.seed)
        draws = len(lists.sources if self._cuts is None else self._cuts)
        self._rules = dataclasses.replace(self._rules, num_sources=draws, mix=lists.mix)
        self._session_table.sources[0], self._steps = len(lists), None

    def __len__(self, *_: Any) -> NoReturn:
        raise TypeError(_NO_INDICES)

    __getitem__ = __add__ = __len__

    def __bool__(self) -> bool:
        """Return True; Python would call `len`, which raises."""
        return True

    @property
    def sources(self) -> Sequence[Any]:
        """The sources; those of all datasets if it is interleaved."""
        return self._source_lists.sources

    @property
    def open_stream(self) -> StreamFactory:
        """The function that opens a source. In an interleaved dataset it depends on the source: see `factory_of`."""
        return self._source_lists.open_stream

    def factory_of(self, index: int) -> StreamFactory:
        """Return the function that opens a source, by the source's index."""
        return self._source_lists.of(index).open_stream

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the dataset, and the index in its `sources`, for a number in `batch.source_index`.

        Raises:
            IndexError: There is no such source; -1 in `batch.source_index` is padding.
        """
        return self._source_lists.locate(index)

    @property
    def sections(self) -> Sections | None:
        """The cut into sections, with the lengths and jitter in use; None for an interleaved dataset."""
        return self._source_lists.lists[0].sections if self._source_lists.mix is None else None

    @property
    def lengths(self) -> IntArray | None:
        """`(num_sources,)`, number of items of each source, -1 if it is unknown; None if all are unknown."""
        return self._source_lists.lengths

    def _plan(self) -> ReadingPlan:
        """Return the plan that readers follow."""
        return ReadingPlan(
            rules=self._rules,
            lists=self._source_lists,
            fill_value=self.fill_value,
            on_error=self.on_error,
            retries=self.retries,
            retry_on=self.retry_on,
            mark_ends=self.mark_ends,
            seed_globals=self.seed_globals,
            cuts=self._cuts,
            context=self.context,
        )

    @property
    def _window_steps(self) -> int | None:
        """Number of time steps of a batch: the context's and T; None if streams cut their own windows."""
        return None if self._rules.time_steps is None else self.context + self._rules.time_steps

    @property
    def _is_endless(self) -> bool:
        """Whether an epoch has no end."""
        return self._rules.padding_mode == "cycle"

    @property
    def batch_size(self) -> int:
        """Number of lanes, B."""
        return self._rules.lanes

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next iteration reads; later iterations count on from it."""
        epoch = options.integer("epoch", epoch, 0, 2**62)
        self._session_table.set_epoch(os.getpid(), epoch)
        self._epoch_request = (self._epoch_request[0] + 1, epoch)

    @property
    def fingerprint(self) -> str:
        """Fingerprint that distinguishes one list of sources from another."""
        return self._source_lists.fingerprint

    def _under(self, rules: Rules) -> StreamDataset:
        """Return a copy under other rules, which shares the rest, and does not change when the list becomes longer."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._rules = rules
        other._session_table = SessionTable(rules)
        other._steps = None
        other._cuts = None if self._cuts is None else self._cuts.under(rules.seed)
        return other

    def _scheduled_lengths(self) -> Lengths:
        """Return the lengths from which batches are counted."""
        if self._rules.padding_mode == "cycle":
            raise TypeError('padding_mode="cycle" has no len(); pass batches_per_epoch= to the loader')
        lengths = self._plan().scheduled_lengths
        if lengths is None or not self._source_lists.knows_lengths:
            raise TypeError("the number of batches is not known; pass lengths= to StreamDataset")
        return lengths

    def _steps_of_groups(self, epoch: int) -> list[int]:
        """Return the number of steps for which each group has data; with `"drop"`, data for all of its lanes."""
        lengths = self._scheduled_lengths()
        if self._steps is None or self._steps[0] != epoch:
            self._steps = epoch, steps_of_groups(self._rules, epoch, lengths)
        return self._steps[1]

    def _steps_of(self, epoch: int, place: Place | None = None) -> int:
        """Return the number of batches of an epoch; raise a `TypeError` without `lengths`, or without an end.

        Args:
            place: A place in the epoch, needed if it goes on under other options than it began with.
        """
        if place is None or not place.has_changed:
            return count_steps(self._rules, self._steps_of_groups(epoch))
        if self._rules.groups.count < self._rules.groups.total:
            raise TypeError("the number of batches depends on the places of all ranks, as options were changed")
        return steps_behind(place, self._rules, self._scheduled_lengths())

    def __iter__(self) -> Iterator[StreamBatch]:
        """Iterate over the parts of this process's lanes, with torch's own `DataLoader` or without.

        Each iteration takes the next epoch number: in this process with its first `next`; in a worker, which begins to
        read at once, with `iter()`. All workers of one `DataLoader` iteration join the same session, in any order.
        """
        # Imported here, because only reading without a loader needs the whole engine.
        from stream_dataloader._engine.torch_dataset.parts import plain_parts

        options.check_items(self._rules)
        self._source_lists.check_given()
        self._iterations += 1
        return plain_parts(self._plan(), self._session_table, self._iterations)

    def __getstate__(self) -> dict[str, Any]:
        state = by_value(self.__dict__ | {"_mixed": None}, _BY_VALUE)
        if not spawning():  # the copy is an independent dataset, so it counts epochs by itself
            state["_session_table"] = None
            state["_next_epoch"] = self._session_table.take_epoch(os.getpid())
            self._session_table.set_epoch(os.getpid(), state["_next_epoch"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {name: state[name].value for name in _BY_VALUE})
        if state["_session_table"] is None:
            self._session_table = SessionTable(self._rules)
            self._session_table.set_epoch(os.getpid(), self.__dict__.pop("_next_epoch"))
