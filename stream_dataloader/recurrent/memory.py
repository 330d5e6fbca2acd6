"""`LaneMemory`: a value of any type for each lane, such as a list of frames, for as long as the lane's stream.

::

    t                 0   1   2   3   4   5          two lanes, streams of 4 and 2 items, then 2 and 3
    lane 0            a   a   a   a | c   c          a, b, c, d: one value each, made by `new()` where its stream
    lane 1            b   b | d   d   d              starts, even inside a window

Guarantees: only the steps of a stream see its value, in order. It is an error to leave a loop early, or to leave out or
repeat a batch or pass one from another loader, because the values would be wrong. A saved state shares nothing with the
values, and loads with `torch.load(..., weights_only=True)`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import numpy as np
import torch

from stream_dataloader._engine.ranks.own_rank import OwnRank
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import StateError, shorten
from stream_dataloader.recurrent.checkpoint import of_rank, state_of
from stream_dataloader.recurrent.order import LaneOrder, Window, check_batch, on_host
from stream_dataloader.recurrent.values import decode, encode, move

if TYPE_CHECKING:
    from typing_extensions import Self

    from stream_dataloader.dataloader import StreamDataLoader

__all__ = ["LaneMemory"]

V = TypeVar("V")


class LaneMemory(Generic[V]):
    """One value of any type for each lane, kept from the start of the lane's stream to its end.

    Use it for memories that `RecurrentState` cannot carry: a list of key frames, a dict, a bank that grows. Values are
    kept by lane number, so batches, the parts of `loader.parts()` and micro-batches (`StreamBatch.split_lanes`) all
    work. Use one memory for each loader and each loop over its batches: a teacher and a student need two.

    Args:
        new: Function that makes the value that a stream begins with.
        rank: Rank of this process, for checkpoints; needs `world_size`. None: taken from torch.distributed.
        world_size: Number of ranks.

    Raises:
        TypeError: `new` is not callable.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.recurrent import LaneMemory
        >>> loader = StreamDataLoader(StreamDataset([4, 2, 3], range, 2, time_steps=2))
        >>> memory = LaneMemory()  # a list for each lane
        >>> for batch in loader:
        ...     for t, seen in memory.steps(batch):
        ...         for lane, before in enumerate(seen):
        ...             if before is not None:  # else the lane is padded at this step
        ...                 before.append(batch.data[t, lane].item())
        ...     print(memory[0], memory[1])
        [0, 1] [0, 1]
        [0, 1, 2, 3] [0, 1]
        [0, 1, 2, 3] [0, 1, 2]
    """

    @overload
    def __init__(self: LaneMemory[list[Any]], *, rank: int | None = ..., world_size: int | None = ...) -> None: ...

    @overload
    def __init__(self, new: Callable[[], V], *, rank: int | None = ..., world_size: int | None = ...) -> None: ...

    def __init__(
        self, new: Callable[[], Any] = list, *, rank: int | None = None, world_size: int | None = None
    ) -> None:
        if not callable(new):
            raise TypeError(f"new must be a function that makes a value, not {new!r}; pass list, or lambda: value")
        self._new: Callable[[], V] = new
        self._rank = OwnRank(rank, world_size)
        self._order = LaneOrder()
        self._values: dict[int, V] = {}
        self._left: str | None = None  # place of a loop that began and has not ended

    def steps(self, batch: StreamBatch) -> Iterator[tuple[int, list[V | None]]]:
        """Iterate over a batch's time steps with the value of each lane.

        Change the values in place, or assign others in the list. They are kept once the loop has ended.

        Args:
            batch: A batch, part or micro-batch, on any device. It must follow the last one given here.

        Yields:
            The time step t, and B values. A value is new where a stream starts, and None where the lane is padded.

        Raises:
            StateError: A lane does not continue where its value stopped: a batch was left out, was repeated, or is from
                another loader. Or the loop before this one was left before its end.
            TypeError: `batch` is not a `StreamBatch`.
        """
        check_batch(batch, "a LaneMemory")
        self._check_ended()
        window, host = Window.of(batch), on_host(batch)
        self._order.check(window, whole="_state" in batch.__dict__)
        lanes = window.lanes.tolist()
        goes_on = self._order.known(window).tolist()
        starts, real = host.is_first.tolist(), window.there.tolist()
        values = [
            self._values[lane] if is_known and lane in self._values else self._new()
            for lane, is_known in zip(lanes, goes_on, strict=True)
        ]
        for t in range(batch.time_steps):
            self._left = f"at t = {t} of batch {batch.batch_index} of epoch {batch.epoch}"
            for row, is_first in enumerate(starts[t]):
                if is_first:
                    values[row] = self._new()
            seen: list[V | None] = [value if there else None for value, there in zip(values, real[t], strict=True)]
            yield t, seen
            for row, there in enumerate(real[t]):
                if there:
                    values[row] = cast(V, seen[row])
        self._order.advance(window, counts=False)
        self._values.update(zip(lanes, values, strict=True))
        self._left = None

    def _check_ended(self) -> None:
        if self._left is not None:
            raise StateError(
                f"the loop over steps() was left {self._left}, so the values have seen only a part of that batch; "
                "iterate over each batch to its end, or start again with reset() or load_state_dict()"
            )

    def __getitem__(self, lane: int) -> V:
        """Return the value of a lane after the last loop.

        Raises:
            KeyError: The lane has had no batch yet.
        """
        if lane not in self._values:
            raise KeyError(f"lane {lane} has no value yet; the lanes with values are {sorted(self._values)}")
        return self._values[lane]

    def reset(self, lanes: Iterable[int] | None = None) -> None:
        """Forget the values of lanes; each lane gets a new value in its next batch.

        Args:
            lanes: Numbers of the lanes; None for all.

        Raises:
            ValueError: A number is negative.
        """
        self._left = None
        chosen = self._order.forget(lanes)
        self._values = {} if chosen is None else {n: v for n, v in self._values.items() if n not in chosen}

    def to(self, device: torch.device | str | int) -> Self:
        """Move the tensors in all values to a device, including objects that have a method `to`.

        Returns:
            The object itself.
        """
        self._values = {lane: move(value, torch.device(device)) for lane, value in self._values.items()}
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the values after the last batch as tensors, numbers, texts, lists, tuples and dicts.

        Values may consist of these, of arrays, sets and deques. Objects of other classes need methods `state_dict` and
        `load_state_dict`, and `new` must make such an object. Save the result with the loader's state after the same
        batch, `batch.state_dict()`. Each rank saves its own; `stream_dataloader.merge_states` merges them.

        Raises:
            StateError: A value holds something else, or a tensor with a gradient. Or a loop was left before its end.
        """
        self._check_ended()
        lanes = np.array(sorted(self._values), np.int64)
        values = [encode(self._values[lane], f"the value of lane {lane}") for lane in lanes.tolist()]
        return state_of(lanes, self._order, self._place, {"values": values})

    def load_state_dict(self, state: Mapping[str, Any], *, loader: StreamDataLoader[Any] | None = None) -> None:
        """Continue from a saved state and forget the current values. Tensors stay on the device that the state has.

        Args:
            state: The result of `state_dict()` on this rank, with the same number of ranks. Or the result of
                `merge_states`, for any number of ranks. It is copied.
            loader: The loader, if it has loaded its state with another number of lanes (`changes=["batch_size"]`). It
                knows the former number of each lane. Values of removed lanes are left out; new lanes start empty.

        Raises:
            StateError: This is not a state of a `LaneMemory`, or it does not have this rank's lanes. Or the loader has
                loaded no state, or one with other lanes.
        """
        own = of_rank(state, "LaneMemory", self._place, loader)
        values: dict[int, V] = {}
        if own is not None:
            rows = zip(own.lanes.tolist(), own.rows.tolist(), strict=True)
            values = {lane: self._decoded(state["values"][row], lane) for lane, row in rows}
        self._values, self._order, self._left = values, LaneOrder() if own is None else own.order(), None

    def _decoded(self, plain: Any, lane: int) -> Any:
        try:
            return decode(plain, self._new)
        except StateError:
            raise
        except Exception as error:  # of an object's own load_state_dict, of data of other types or without end
            raise StateError(f"the saved value of lane {lane} cannot be read: {shorten(error)}") from error

    @property
    def _place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._rank.numbers

    def _snapshot(self) -> Self:
        """Return a copy of the current values that shares nothing mutable with them."""
        twin = copy.copy(self)
        twin._order, twin._values = copy.deepcopy(self._order), copy.deepcopy(self._values)
        return twin

    def __repr__(self) -> str:
        return f"LaneMemory({'nothing kept' if not self._values else f'{len(self._values)} lanes'})"
