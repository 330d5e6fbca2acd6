"""`StreamDataLoader`, which users iterate over. It assigns epochs to iterators, and finishes each batch.

Guarantees: the same batches for any number of workers; a batch is delivered if and only if its mask has a step set; an
iteration that ends early leaves no process, thread or file behind.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Generic

import torch

from stream_dataloader._engine import options
from stream_dataloader._engine.device import Destination, HasDestination
from stream_dataloader._engine.loader.attributes import KeptLength, TorchAttributes
from stream_dataloader._engine.loader.base_position import KeptLanes
from stream_dataloader._engine.loader.iteration import CollateFn, Output
from stream_dataloader._engine.loader.position import GROWN, LoaderPosition
from stream_dataloader._engine.loader.starter import Starter
from stream_dataloader._engine.memory.pickling import ByValue
from stream_dataloader._engine.progress import with_progress
from stream_dataloader._engine.ranks.ranks import Ranks
from stream_dataloader._engine.reading.deferred import Begun, Deferred, Turn
from stream_dataloader._engine.reading.lists import SourceLists
from stream_dataloader._engine.workers.settings import WorkerMethod, WorkerSettings, check_dataset
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StreamError
from stream_dataloader.stats import LoaderStats

if TYPE_CHECKING:
    from typing_extensions import Never, TypeVar

    Batch_co = TypeVar("Batch_co", default=StreamBatch, covariant=True)
else:  # only type checkers need the default, and older Pythons do not support it
    from typing import TypeVar

    Batch_co = TypeVar("Batch_co", covariant=True)

__all__ = ["StreamDataLoader"]


class StreamDataLoader(TorchAttributes, HasDestination, Generic[Batch_co]):
    """Iterates over a `StreamDataset` in temporally coherent batches, read by several worker processes.

    Row b of a batch continues row b of the batch before it. The class is made to be subclassed: build the dataset in
    `__init__` and pass it on. For type checkers it is generic in the type of its batches: `StreamBatch`, or the type
    that `collate_fn` returns, which a subclass names: `class VideoLoader(StreamDataLoader[torch.Tensor])`.

    Args:
        dataset: The dataset, which also says how lanes and windows are made.
        num_workers: Number of workers; 0 reads in the thread that asks for batches. A worker reads whole lanes, so at
            most `batch_size` workers are used.
        collate_fn: Makes a batch from the list of the B lanes' windows, in lane order; the loader then yields its
            result. None yields `StreamBatch`es. A window is a pytree of tensors `(T, ...)`, or, without the dataset's
            `time_steps`, the object that the stream yielded. An idle lane's window is padding, or, without
            `time_steps`, the dataset's `fill_value` itself. The function runs in the main process.
        prefetch_factor: Number of messages that workers, if any, read ahead; None means 2. A message is one batch, or
            several if they are cheap: up to 64 that take a few milliseconds to read, and 4 MB together.
        pin_memory: Put batches into page-locked memory, for fast copies to an accelerator. If you copy on a CUDA stream
            of your own, hold the batch until the copy is done. Experimental: not yet run on a GPU.
        persistent_workers: Keep the workers from one epoch to the next.
        batches_per_epoch: Number n of batches of an epoch, for trainers that count them; needs `padding_mode="cycle"`.
            Each epoch goes on where the one before stopped. None: an epoch ends when all sources were read.
        multiprocessing_context: `"fork"`, `"spawn"`, `"forkserver"` or a context; None is Python's default.
        worker_init_fn: Called in each worker when it starts, with the worker's id.
        timeout: Seconds to wait for a worker before `WorkerTimeoutError`, and for another rank before `RankError`. With
            0 the wait for a worker has no limit, and the wait for a rank has the limit of torch.distributed's store.
        device: Move batches to this device. A CUDA device gets them one batch ahead of use, on a CUDA stream of the
            loader's own, from page-locked memory, with or without `pin_memory`; experimental, as this has not yet run
            on a GPU. See also `to`.
        max_restarts: How often in an epoch a worker may die. New workers then continue after the last batch delivered,
            and no item is lost or read twice. If three workers die at the same place of a source, that is an error, or
            the source is skipped with the dataset's `on_error="skip"`.
        virtual_ranks: Number of virtual ranks that the epoch's order is dealt to. Each has lanes of its own, and ranks
            share them evenly. None: as many as ranks. With more, a checkpoint can be continued with other world sizes,
            with the same global batches.
        rank: Rank of this process; needs `world_size`. None: ask torch.distributed, if it is initialised when an
            iteration begins; otherwise there is one rank.
        world_size: Number of ranks.
        process_group: The ranks that share the epoch, if they are not all ranks: a process group, or a dimension of a
            `DeviceMesh`, of torch.distributed. (Model-parallel ranks read the same data.)
        worker_method: Kind of the workers. `"process"`: processes, for streams in Python. `"thread"`: threads of this
            process, for streams that let other threads run, as decoders do. Objects that streams share must be
            thread-safe. Threads cannot be killed: after a `timeout` a thread runs on until its stream returns. `"ray"`:
            tasks on the nodes of a Ray cluster, see the guide "Beyond one machine"; needs the extra `ray`.
        ray_remote_args: Options of `ray.remote` for each worker, such as `{"num_cpus": 2}`; needs
            `worker_method="ray"`. None: a worker takes one CPU.

    Raises:
        TypeError: The dataset is not a `StreamDataset`, or an option is not the loader's; says where it belongs.
        ValueError: An option is out of range, needs workers and there are none, or conflicts with another.
        RuntimeError: With the first `next`: Ray is not initialized.
        ImportError: `worker_method="ray"`, and Ray is not installed.

    Example:
        >>> from stream_dataloader import StreamDataset, StreamDataLoader
        >>> dataset = StreamDataset([range(3), range(10, 15)], iter, batch_size=2, time_steps=2)
        >>> [batch.data.tolist() for batch in StreamDataLoader(dataset)]
        [[[0, 10], [1, 11]], [[2, 12], [0, 13]], [[0, 14], [0, 0]]]
    """

    def __init__(
        self,
        dataset: StreamDataset,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Batch_co] | None = None,
        *,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float = 0,
        device: torch.device | str | int | None = None,
        max_restarts: int = 0,
        virtual_ranks: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        batches_per_epoch: int | None = None,
        worker_method: WorkerMethod = "process",
        ray_remote_args: Mapping[str, Any] | None = None,
        **misplaced: Never,
    ) -> None:
        options.refuse_misplaced(misplaced, StreamDataset, StreamDataLoader)
        self.dataset: StreamDataset = check_dataset(dataset)
        rules = self.dataset._rules
        options.warn_of_idle_lanes(rules)
        self.num_workers = options.num_workers(num_workers, rules.lanes)
        self.collate_fn = collate_fn
        if collate_fn is not None:
            options.check_callable("collate_fn", collate_fn, "a function of the list of windows, or None")
        else:
            options.check_items(rules)
        self._settings = WorkerSettings(
            num_workers=self.num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
            pin_memory=pin_memory,
            max_restarts=max_restarts,
            worker_method=worker_method,
            ray_remote_args=ray_remote_args,
        )
        in_threads = worker_method == "thread" and self.num_workers > 0
        options.check_seed_globals(self.dataset.seed_globals, 'worker_method is "thread"', in_threads=in_threads)
        self._destination = Destination(device, self._settings.pin_memory)
        seconds = self._settings.timeout
        self._ranks = Ranks(self.dataset, seconds, virtual_ranks, rank, world_size, process_group)
        self._ranks.find_rank()
        self._batches_per_epoch = options.batches_per_epoch(batches_per_epoch, rules.padding_mode)
        self._position = LoaderPosition(self.dataset, self._ranks, self._batches_per_epoch)
        self._start_anew()
        self._kept_length = KeptLength()

    def _start_anew(self) -> None:
        """Create a starter for this process, with no current iteration, and follow the dataset's list."""
        self._turn = Turn()
        self._starter = Starter(self._ranks, self._settings, self._turn)
        self.dataset._list_readers.add(self)

    @contextlib.contextmanager
    def _hold(self, _before: SourceLists, longer: SourceLists) -> Iterator[Callable[[], None]]:
        """Stand still while the dataset's list becomes longer, see `ListReader`."""
        position, starter, turn = self._position, self._starter, self._turn
        with turn.taken():
            reader, iteration = (turn.reader(), starter.newest) if starter.is_reading else (None, None)
            is_inside = reader is not None or position.coming().step > 0
            refusal = self._ranks.why_not_grown
            if is_inside and refusal is not None:
                raise ValueError(refusal)
            left = position.left_epoch if refusal is None else None
            state = loaded = None
            if reader is not None and iteration is not None:
                state = position.reached_state(iteration.epoch)
            elif left is not None:
                state = position.reached_state(left)
            elif is_inside:
                state = position.coming_state()
            if state is not None:  # read before anything changes, as an epoch may have no end with the longer list
                grown = self.dataset._under(self.dataset._rules)
                grown._take_up(longer)
                loaded = position.read(self._ranks.with_draws_of_all(state, longer.fingerprint), GROWN, grown)
            wanted = position.wanted  # by `set_epoch`, after the epoch that is being read

            def go_on() -> None:
                rest = [] if iteration is None or not iteration.output.parts else iteration.rest_of_step()
                starter.stop_workers()
                if self.dataset._source_lists is not longer:  # a member of `side_by_side` is a copy
                    self.dataset._take_up(longer)
                self._ranks.find_rank(() if loaded is None else loaded.place.past)
                starter.renew(self._settings)
                if state is not None and loaded is not None:
                    if is_inside:
                        position.load(state, GROWN, loaded)
                    elif left is not None:
                        position.restate(left, loaded)
                if reader is not None and iteration is not None:
                    batches, end = starter.begin(position, iteration.output)
                    position.mark_as_reached()
                    reader.go_on(itertools.chain(rest, batches), end)
                if wanted is not None:
                    position.set_epoch(wanted)

            yield go_on

    def _stop_workers(self) -> None:
        """End the current iteration and the workers, and wait until they are gone."""
        self._starter.stop_workers()

    def _find_rank(self) -> None:
        """Find this rank, which may be known only now, and adopt its rules, with new workers."""
        before = self._ranks.dataset
        moved = self._ranks.find_rank(self._position.coming().past)
        if self._ranks.dataset is before:
            return
        self._starter.end()
        if moved:
            self._position.forget_place()
        self._starter.renew(self._settings)
        if moved and self._position.loaded is not None:
            self.load_state_dict(*self._position.loaded)

    @property
    def batch_size(self) -> int:
        """Number of lanes, B."""
        return self.dataset.batch_size

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches of an epoch, as given to the constructor."""
        return self._batches_per_epoch

    @property
    def epoch(self) -> int:
        """The number of the epoch that is being read; between epochs, of the one that `iter()` would begin.

        So after `load_state_dict`, a loop `for epoch in range(loader.epoch, epochs)` continues correctly.
        """
        if self._starter.is_reading:
            return self._position.number
        self._find_rank()
        return self._position.coming_number

    @property
    def failures(self) -> list[StreamError]:
        """Errors of streams that the dataset's `on_error` skipped, and gaps of live streams (`GapError`)."""
        return self._position.failures

    @failures.setter
    def failures(self, failures: list[StreamError]) -> None:
        self._position.failures = failures

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next iteration reads; later iterations count on from it.

        Without it the first epoch is 0. Each iteration takes the next number with its first `next`, even if it is not
        read to its end. The last call counts, on the loader or on the dataset.

        With `batches_per_epoch`, 0 starts the run over. Any other number only renames the coming epoch; the run
        continues where it is. A number that does not match the run raises a `RuntimeWarning`.
        """
        self._position.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch_co]:
        """Read the next epoch. It begins with the first `next`, which starts workers and uses a loaded state.

        This first `next` also closes the previous iterator, if any, which raises from then on. Only one thread at a
        time may read.
        """
        return Deferred(functools.partial(self._begin, self.collate_fn), self._turn)

    def parts(self) -> Iterator[StreamBatch]:
        """Read the next epoch without regrouping: iterate over each worker's parts, step after step.

        A part is a `StreamBatch` of one worker's lanes, for a model with a state for each `worker_id`. `collate_fn` is
        not called. Ranks do not wait for each other, and may yield different numbers of parts.
        """
        options.check_items(self.dataset._rules)
        return Deferred(functools.partial(self._begin, None, parts=True), self._turn)

    def _begin(self, collate_fn: CollateFn | None, *, parts: bool = False, whole_steps: bool = False) -> Begun[Any]:
        """Begin the next epoch."""
        self._position.warn_of_rest()
        self._find_rank()
        output = Output(collate_fn, parts, whole_steps, self.device, self._destination)
        return self._starter.begin(self._position, output)

    def stats(self) -> LoaderStats:
        """Return counts and times since the loader was built, of the trainer's process and of workers.

        `print(loader.stats())` shows a short table; subtract earlier stats for the time in between.
        """
        return self._starter.stats()

    def progress(self, **options: Any) -> Iterator[Any]:
        """Iterate over the next epoch, with a progress bar: `for batch in loader.progress():`.

        The bar counts batches if their number is known (`lengths`, `batches_per_epoch`), otherwise finished sources. It
        shows items per second and the padding share, works in notebooks, and stays silent without a terminal. In a
        resumed epoch it begins at the resumed place. With several ranks only the first one draws a bar.

        Args:
            options: Options of `tqdm`, such as `desc="train"`, `leave=False` or `disable=False`.
        """
        return with_progress(self, options)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the loader's position: after the batches that were delivered, not those that workers have read ahead.

        The state is plain data that JSON can hold, unless a stream's own `state_dict` is not. During an epoch, also
        after a `break`, it is a place in that epoch. Before the first `next`, after an epoch's end and after
        `set_epoch` it is the beginning of the next epoch. An epoch ends with `StopIteration`, or, with the dataset's
        `lengths` or `batches_per_epoch`, with its last batch.

        Args:
            batches: Return the state after this number of batches; None: after all that were delivered. Trainers fetch
                batches ahead of those they have used. States of the last 64 batches are kept. See also
                `StreamBatch.state_dict`.

        Raises:
            ValueError: Fewer batches were delivered, or their state is no longer kept.
        """
        if self._position.is_between_epochs:
            self._find_rank()
        return self._position.state_dict(batches)

    def load_state_dict(self, state: Mapping[str, Any], changes: Iterable[str] = ()) -> None:
        """Continue from a saved state with the next `iter()`, bit for bit, with any number of workers.

        The loader adopts the state's seed and virtual ranks. A running iteration ends. If another epoch is set before
        `iter()`, that epoch is read from its beginning.

        Args:
            state: The result of `state_dict()` on this rank, with the same number of ranks; or the result of
                `merge_states` for all ranks, with any number of ranks.
            changes: Options that you changed on purpose since the state was saved: `"time_steps"`, `"batch_size"`,
                `"sources"` for a list that has become longer, or `"weights"` of `interleave`. The rest of the epoch is
                then read once, under the new options. Lanes keep their streams. If there are fewer lanes, the streams
                of the others come next, and begin with `is_first`. New sources come after the remaining ones; with
                `"cycle"` they join at the next pass. New weights hold from the next draw on, and need the states of all
                ranks.

        Raises:
            ValueError: `changes` has another name.
            StateError: The state belongs to other sources or options, or to virtual ranks that this rank does not have;
                the message says which.
        """
        changes = options.check_changes(changes)
        with self._turn.taken():
            self._position.loaded = None
            # Read first: a state that is refused must leave a running iteration alone.
            loaded = self._position.read(state, changes)
            self._starter.end()
            self._find_rank()
            self._position.load(state, changes, loaded)
            self._find_rank()  # the epoch may have begun with other weights

    @property
    def _endless_or_sources(self) -> int | None:
        """Number of sources of an epoch; None if it has no end."""
        return None if self.dataset._is_endless else len(self.dataset.sources)

    @property
    def _kept_lanes(self) -> KeptLanes | None:
        """The lanes of the state that was loaded last, as they go on here, for carried states; None before any was."""
        return self._position.kept_lanes

    def skip(self, batches: int) -> int:
        """Skip the next batches, at most to the epoch's end; the next `iter()` goes on after them.

        With the dataset's `lengths` nothing is read, as the schedule gives the place of each lane. Otherwise the
        batches are read and dropped. A running iteration ends. An epoch of `batches_per_epoch` batches ends after that
        number.

        Args:
            batches: Number of batches to skip.

        Returns:
            The number of batches skipped; fewer than `batches` if the epoch ended before.
        """
        count = options.integer("batches", batches, 0)
        # On several ranks an endless epoch that was left may still be of a list that has grown since.
        self.load_state_dict(self.state_dict(), ("sources",))
        later = self._position.later(self.state_dict(), count)
        if later is None:
            passed = sum(1 for _ in itertools.islice(self, count))
            later = self.state_dict(), passed
        self.load_state_dict(later[0])
        return later[1]

    def __len__(self) -> int:
        """Return the number of batches of the epoch being read, or of the one that `iter()` would begin.

        This counts the whole epoch, even when a loaded state starts in the middle of it. It is exact unless the
        dataset's `on_error` skips streams, or streams yield `NOTHING_YET`: it is computed from the dataset's `lengths`,
        without these.

        Raises:
            TypeError: Unknown without the dataset's `lengths`; endless without `batches_per_epoch`.
        """
        if self.batches_per_epoch is not None:
            return self.batches_per_epoch
        epoch = self.epoch
        count = self._position.count(epoch)
        self._kept_length.asked(epoch, count)
        return count

    def __repr__(self) -> str:
        given = {"collate_fn": self.collate_fn, "device": self.device, "batches_per_epoch": self.batches_per_epoch}
        more = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
        return f"{type(self).__name__}({self.dataset!r}, num_workers={self.num_workers}{more})"

    def __bool__(self) -> bool:
        """Return True; Python would call `len`, which may not be known."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Copy the loader: during an epoch, the copy has its state, and goes on after the batch delivered last."""
        place = None if self._position.is_between_epochs else self._position.state_dict(None)
        return self.__dict__ | {
            "_copied_place": place,
            "_starter": None,
            "_turn": None,
            "collate_fn": ByValue(self.collate_fn, "collate_fn"),
            "_settings": ByValue(self._settings),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.collate_fn = state["collate_fn"].value
        self._settings = state["_settings"].value
        self._start_anew()
        if (place := self.__dict__.pop("_copied_place")) is not None:
            self.load_state_dict(place, ("sources",))  # the list may have grown since the epoch was left
