"""Accelerate: prepared loaders that announce their end, deliver on its device, and resume at the next batch.

Accelerate applies accumulated gradients at the batch that the loader declares to be the last one. To know the last
one, the loader fetches one batch ahead, unless epochs have a fixed number of batches::

    fetched from the loader    0  1  2  3  end
    in hand                       0  1  2  3      a checkpoint belongs to the batch in hand
    end_of_dataloader             no no no yes
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState

from stream_dataloader._engine.loader.epoch import Epoch
from stream_dataloader._engine.options import check_changes
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.errors import StateError
from stream_dataloader.integrations._all_ranks import CARRIERS, Carried, Carrier, gathered, own_state

__all__ = ["PreparedLoader", "prepare"]

Batch = TypeVar("Batch")


def prepare(
    accelerator: Accelerator,
    loader: StreamDataLoader[Batch],
    *,
    device_placement: bool | None = None,
    carry: Carrier | Iterable[Carrier] | None = None,
    changes: Iterable[str] = (),
) -> PreparedLoader[Batch]:
    """Prepare a loader for an `Accelerator`, as `accelerator.prepare` does with torch's own loaders.

    Gradient accumulation sees the end of an epoch, batches arrive on the accelerator's device, `save_state` and
    `load_state` include the place in the data, and `skip_first_batches` works. Always prepare loaders in the same
    order, since checkpoints number them.

    Args:
        accelerator: The accelerator.
        loader: The loader. `batch_size` of its dataset is the number of lanes of one process.
        device_placement: Whether to deliver batches on `accelerator.device`; None: the accelerator's own setting.
            A loader that already has a device keeps it.
        carry: State that the model carries along the loader's lanes: a `RecurrentState`, `LaneCache` or
            `LaneMemory`, or a list of them. `save_state` and `load_state` include it for all ranks, as of the last
            batch that it was given.
        changes: Options that you changed on purpose since the checkpoint was saved, such as `["batch_size"]`; see
            `StreamDataLoader.load_state_dict`. The carried state follows the lanes that continue.

    Raises:
        TypeError: `loader` is not a `StreamDataLoader`, or `carry` has another type.
        ValueError: The accelerator splits or dispatches batches among its processes, or `changes` has an unknown name.

    Example::

        model, optimizer = accelerator.prepare(model, optimizer)
        loader = stream_dataloader.integrations.accelerate.prepare(accelerator, loader)
    """
    if isinstance(loader, PreparedLoader):
        return loader
    _check(accelerator, loader)
    changes = check_changes(changes)
    if device_placement is None:
        device_placement = accelerator.device_placement
    # The loader copies to the device itself: it keeps the memory of a batch until the copy is done.
    if device_placement and loader.device is None and accelerator.device.type != "cpu":
        loader.to(accelerator.device)
    prepared = PreparedLoader(loader)
    accelerator.register_for_checkpointing(_OfAllRanks(accelerator, prepared, Carried(carry), changes))
    return prepared


def _check(accelerator: Accelerator, loader: Any) -> None:
    if not isinstance(loader, StreamDataLoader):
        kind = type(loader).__name__
        raise TypeError(f"loader must be a StreamDataLoader(dataset, num_workers=...), not a {kind}; build one")
    for name in ("split_batches", "dispatch_batches"):
        if accelerator.num_processes > 1 and getattr(accelerator, name):
            what = f"the accelerator has {name}=True, but each process reads its own lanes"
            raise ValueError(f"{what}; leave it out, and give StreamDataset the batch_size of one process")


class _Place(NamedTuple):
    """Place of a loop: the number of batches of an epoch that were handed out, and the loader's state there."""

    epoch: int
    delivered: int
    state: Callable[[], dict[str, Any]]

    @classmethod
    def of(cls, loader: StreamDataLoader[Any], epoch: Epoch) -> _Place:
        """Return the place after the batch of an epoch that was just fetched."""
        record, length = epoch.record(), loader.batches_per_epoch
        number, delivered = epoch.number, record.step
        if epoch.epochs is not None and length is not None:
            number, delivered = epoch.epochs.at(record.step)
            if not delivered:  # after the last batch
                number, delivered = number - 1, length
        return cls(number, delivered, functools.partial(loader._position.state_of, epoch, record))


class PreparedLoader(Generic[Batch], DataLoaderStateMixin):
    """A `StreamDataLoader` that tells Accelerate when the batch in hand is the last one; see `prepare`.

    Args:
        loader: The loader. Use it for everything that this class does not offer.

    Attributes:
        loader: The loader.
        end_of_dataloader: Whether the batch in hand is the epoch's last one.
    """

    # For accelerate.skip_first_batches: its DataLoader must read in this process, and draw no random numbers.
    sampler = None
    drop_last = False
    num_workers = 0
    prefetch_factor = None
    collate_fn = staticmethod(operator.itemgetter(0))

    def __init__(self, loader: StreamDataLoader[Batch]) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self.generator = torch.Generator(device="cpu")
        self._place: _Place | None = None  # place of the loop that runs, or was left; None between epochs
        self._ended: int | None = None  # the epoch whose last batch was in hand when the loaded state was saved

    @property
    def batch_size(self) -> int:
        """Number of lanes of this process."""
        return self.loader.batch_size

    @property
    def epoch(self) -> int:
        """Number of the epoch that is being read, or of the next one; see `StreamDataLoader.epoch`."""
        if self._ended is not None:
            return self._ended
        return self.loader.epoch if self._place is None else self._place.epoch

    @property
    def step(self) -> int:
        """Number of batches of the epoch so far, including those before a loaded state; 0 between epochs."""
        return 0 if self._place is None else self._place.delivered

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next iteration reads; see `StreamDataLoader.set_epoch`."""
        if epoch != self._ended:  # else the loaded epoch, which has no batch left, is still to be read
            self.loader.set_epoch(epoch)
            self._place = self._ended = None

    def __len__(self) -> int:
        """Return the number of batches of the epoch being read, or of the next one; see `StreamDataLoader`."""
        return len(self.loader)

    def __bool__(self) -> bool:
        """Return True. Otherwise Python would ask for `len`, which may not be known."""
        return True

    def __iter__(self) -> Iterator[Batch]:
        """Read the next epoch, or the rest of the one that was loaded."""
        if self._ended is not None:
            self._ended = None
            return
        self._place = None
        self.begin()
        self.remainder = 0  # no row is repeated, so gather_for_metrics has nothing to cut off
        try:
            yield from self._read()
            self._place = None
        finally:
            self.end()

    def _read(self) -> Iterator[Batch]:
        """Fetch one batch ahead, but not in epochs of n batches, because their end is known."""
        batches, length = iter(self.loader), self.loader.batches_per_epoch
        following, epoch = _fetch(batches), None
        while following is not None:
            if isinstance(following, Exception):
                raise following
            (batch,) = following
            epoch = epoch or self.loader._position.epoch  # this loop's epoch, even if another one is set meanwhile
            assert epoch is not None
            place = _Place.of(self.loader, epoch)
            if length is None:
                following = _fetch(batches)
            self._place = place
            self.end_of_dataloader = following is None if length is None else place.delivered == length
            yield batch
            if length is not None:
                following = _fetch(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's loader after the batch in hand; see `StreamDataLoader.state_dict`."""
        return self.loader.state_dict() if self._place is None else self._place.state()

    def load_state_dict(self, state: Mapping[str, Any], changes: Iterable[str] = ()) -> None:
        """Continue from a saved state with the next `iter()`; see `StreamDataLoader.load_state_dict`."""
        self.loader.load_state_dict(state, changes)
        self._place = self._ended = None

    @property
    def dataset(self) -> _Numbered[Batch]:
        """Batches by number, for `skip_first_batches`. The `StreamDataset` is `loader.dataset`."""
        return _Numbered(self)

    @property
    def batch_sampler(self) -> _Numbers[Batch]:
        """Numbers of the batches, for `accelerate.skip_first_batches`."""
        return _Numbers(self)


def _fetch(batches: Iterator[Batch]) -> tuple[Batch] | Exception | None:
    """Return the next batch, the error in its place, or None at the end."""
    try:
        return (next(batches),)
    except StopIteration:
        return None
    except Exception as error:  # raised in its own place, after the batch before it was used
        return error


class _Numbers(Generic[Batch]):
    """Numbers of an epoch's batches, in lists of one, each with the iterator that delivers it."""

    def __init__(self, prepared: PreparedLoader[Batch]) -> None:
        self._prepared = prepared

    def __iter__(self) -> Iterator[list[tuple[int, Iterator[Batch]]]]:
        batches = iter(self._prepared)
        for number in itertools.count():
            yield [(number, batches)]

    def __len__(self) -> int:
        return len(self._prepared)


class _Numbered(Generic[Batch]):
    """Batches of an epoch by number. Batches before a loaded state count as skipped."""

    def __init__(self, prepared: PreparedLoader[Batch]) -> None:
        self._prepared = prepared

    def __getitem__(self, numbered: tuple[int, Iterator[Batch]]) -> Batch:
        number, batches = numbered
        while True:
            batch = next(batches)  # its StopIteration also ends torch's iterator, which reads in this process
            if self._prepared.step > number:
                return batch

    def __len__(self) -> int:
        """Return the number of windows, padding included."""
        return len(self._prepared) * self._prepared.batch_size


class _OfAllRanks:
    """State of a loader and of its model's carriers, on all ranks."""

    def __init__(
        self, accelerator: Accelerator, prepared: PreparedLoader[Any], carried: Carried, changes: Iterable[str]
    ) -> None:
        self._accelerator, self._prepared, self._carried = accelerator, prepared, carried
        self._changes = changes

    def state_dict(self) -> dict[str, Any]:
        others = getattr(self._accelerator, "_custom_objects", [])
        if self._accelerator.num_processes > 1 and any(isinstance(other, CARRIERS) for other in others):
            what = "register_for_checkpointing saves the carried state of one process, but there are"
            many = self._accelerator.num_processes
            raise ValueError(f"{what} {many}; pass it to prepare(accelerator, loader, carry=...)")
        state = {"states": gathered(self._prepared.state_dict()), "epoch": self._prepared.epoch}
        return state | {"carried": gathered(self._carried.state_dict())} if self._carried else state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if "states" not in saved:
            what = "the checkpoint holds another object's state where this loader's should be"
            raise StateError(f"{what}; prepare loaders in the order of the run that saved it")
        self._prepared.load_state_dict(own_state(saved["states"]), self._changes)
        if "carried" in saved:
            self._carried.load(saved["carried"], self._prepared.loader)
        if saved["epoch"] < self._prepared.loader.epoch:  # the next iteration reads an epoch that has no batch left
            self._prepared._ended = saved["epoch"]
