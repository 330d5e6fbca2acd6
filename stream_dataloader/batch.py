"""`StreamBatch`: what the loader yields, Time x Batch, with the bookkeeping a recurrent network needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from stream_dataloader._items.layout import INLINE_BYTES, as_array, as_tensor, flatten, leaf_paths, unflatten
from stream_dataloader._memory.pickling import Message

__all__ = ["StreamBatch"]


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """One batch: B lanes, T time steps, each lane going on where it stopped in the batch before.

    A *part* (`loader.parts()`, or torch's own `DataLoader` over a `StreamDataset`) is a `StreamBatch` too,
    of the lanes of one worker only; B is then the number of those lanes.
    """

    data: Any
    """The items, in the structure that the stream yields. Each leaf is a tensor `(T, B, ...)`; a leaf that
    torch cannot hold (a string, a list, any other object) is a list of lists `[t][b]`, None where padded."""

    reset: torch.Tensor
    """`(B,)` bool: the lane starts a new stream at t = 0, so its hidden state must be zeroed."""

    is_start: torch.Tensor
    """`(T, B)` bool: the step is the first of its stream. `is_start[0]` is `reset`."""

    mask: torch.Tensor
    """`(T, B)` bool: the step is read for the first time this epoch. False: padding, or read again."""

    source: torch.Tensor
    """`(T, B)` int64: index into `sources`; -1 = padding."""

    position: torch.Tensor
    """`(T, B)` int64: index of the time step within its stream; -1 = padding."""

    worker_id: torch.Tensor
    """`(B,)` int64: the worker that owns the lane; 0 with `num_workers=0`."""

    lane: torch.Tensor
    """`(B,)` int64: the lanes, `0 ... batch_size - 1`; those of one worker in a part."""

    step: int
    """The batch's number in its epoch, from 0."""

    epoch: int
    """The epoch's number."""

    def __post_init__(self) -> None:
        shape = self.mask.shape
        if len(shape) != 2 or not shape == self.is_start.shape == self.source.shape == self.position.shape:
            raise ValueError(
                "mask, is_start, source and position must share one shape (T, B), and are "
                f"{[tuple(t.shape) for t in (self.mask, self.is_start, self.source, self.position)]}"
            )

    @classmethod
    def of_checked(cls, **values: Any) -> StreamBatch:
        """A batch of values that are known to fit together: all of the fields, unchecked."""
        batch = object.__new__(cls)
        batch.__dict__.update(values)
        return batch

    def __len__(self) -> int:
        """Number of lanes, B."""
        return self.mask.shape[1]

    @property
    def time_steps(self) -> int:
        """Number of time steps, T."""
        return self.mask.shape[0]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> StreamBatch:
        """A batch with `function` applied to every tensor, those within `data` included."""

        def on_tensor(leaf: Any) -> Any:
            return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

        batch = StreamBatch(**{f.name: map_leaves(getattr(self, f.name), on_tensor) for f in fields(self)})
        if (state := self.__dict__.get("_state")) is not None:
            batch.remember(state)
        return batch

    def remember(self, state: Callable[[], dict[str, Any]]) -> None:
        """Have `state_dict` return what `state` does; the loader's."""
        object.__setattr__(self, "_state", state)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state as of this batch: loaded, it goes on with the next one.

        Raises:
            ValueError: The batch did not come from a `StreamDataLoader`, or went through a pickle, or is a part.
        """
        state: Callable[[], dict[str, Any]] | None = self.__dict__.get("_state")
        if state is None:
            raise ValueError("only batches that come straight from a StreamDataLoader know its state")
        return state()

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> StreamBatch:
        """A batch whose tensors are on `device`; see `torch.Tensor.to`.

        Args:
            device: Target device, as `torch.Tensor.to` takes it.
            non_blocking: Copy asynchronously; takes effect from pinned memory to an accelerator.
        """
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: Any = None) -> StreamBatch:  # noqa: ARG002
        """A batch in page-locked memory, from which copies to an accelerator are fast.

        Args:
            device: Ignored; torch's pinning passes it. The memory is pinned for the current accelerator.
        """
        return self.map(lambda tensor: tensor.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        return _batch_of, ({field.name: map_leaves(getattr(self, field.name), _inlined) for field in fields(self)},)

    def __repr__(self) -> str:
        worker_ids = sorted(set(self.worker_id.tolist()))
        return (
            f"StreamBatch(step={self.step}, epoch={self.epoch}, time_steps={self.time_steps}, lanes={len(self)}, "
            f"data={describe(self.data)}, resets={int(self.reset.sum())}, "
            f"padding={1 - float(self.mask.float().mean()):.0%}, worker_id={worker_ids})"
        )


class _Inlined:
    """A small tensor on its way through a pipe: within the message, where torch would open shared memory for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return as_tensor, (np.ascontiguousarray(as_array(self._tensor)), self._tensor.dtype)


def _inlined(leaf: Any) -> Any:
    small = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.nbytes <= INLINE_BYTES
    return _Inlined(leaf) if small else leaf


def _batch_of(values: dict[str, Any]) -> StreamBatch:
    return StreamBatch(**values)


class SentBatch(StreamBatch):
    """A batch that was pickled where it was made, and is read back from that when it is looked at.

    A queue pickles and frees what is put into it in a background thread. An error would be lost there, and a
    worker that ends while that thread frees a tensor crashes (torch takes the interpreter's lock in between).
    """

    def __init__(self, batch: StreamBatch) -> None:
        object.__setattr__(self, "_message", Message(batch))

    def __getattr__(self, name: str) -> Any:
        if name not in {field.name for field in fields(self)}:
            raise AttributeError(name)
        self.__dict__.update(self._message.read().__dict__)
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._message,)


def _same(batch: StreamBatch) -> StreamBatch:
    return batch


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to each leaf, looking into items' containers and lists."""
    if type(value) is list:
        return [map_leaves(element, function) for element in value]
    structure, leaves = flatten(value)
    if structure.type is None:
        return function(value)
    return unflatten(structure, iter([map_leaves(leaf, function) for leaf in leaves]))


def describe(value: Any) -> str:
    """Shapes instead of data: `{['image']: uint8 (4, 2, 3), ['name']: list [4][2]}`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if type(value) is list:
        inner = f"[{len(value[0])}]" if value and type(value[0]) is list else ""
        return f"list [{len(value)}]{inner}"
    structure, leaves = flatten(value)
    if structure.type is None:
        return type(value).__name__
    named = zip(leaf_paths(structure, ""), leaves, strict=True)
    return "{" + ", ".join(f"{path}: {describe(leaf)}" for path, leaf in named) + "}"
