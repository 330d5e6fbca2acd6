"""`StreamBatch`: the loader's batch, Time x Batch, with the bookkeeping that a recurrent network needs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import InitVar, dataclass, fields
from typing import Any, cast

import torch

from stream_dataloader._engine import options
from stream_dataloader._engine.html import batch_html, page
from stream_dataloader._engine.items.layout import is_dense
from stream_dataloader._engine.items.structure import describe, named_leaves
from stream_dataloader._engine.kept_fields import Kept, KeptFields, map_leaves
from stream_dataloader._engine.memory import copies

__all__ = ["StreamBatch"]


@dataclass(frozen=True, eq=False)
class StreamBatch(KeptFields):
    """One batch: B lanes of T time steps. Each lane continues where it stopped in the batch before.

    A *part* (from `loader.parts()`, or from torch's own `DataLoader` over a `StreamDataset`) is a `StreamBatch` too. It
    has the lanes of one worker only, and B is their number.
    """

    data: Any
    """The items, in the structure that the stream yields. Each leaf is a tensor `(T, B, ...)`; a leaf that
    torch cannot hold (a string, a list, any other object) is a list of lists `[t][b]`, None where padded.

    Tensors that are not dense (sparse, nested, quantized, on "meta") and masked arrays count as objects, too. Other
    subclasses of tensors and arrays lose their type. Every kind of dict becomes a plain dict."""

    reset: torch.Tensor
    """`(B,)` bool: the lane starts a new stream or sequence at t = 0, so its hidden state must be zeroed. With the
    dataset's `context=k`: at t = k."""

    is_first: torch.Tensor
    """`(T, B)` bool: the time step is the first of its stream, or of a sequence that a stream marks in itself
    (`protocols.MarksStarts`). `is_first[context]` is `reset`."""

    mask: torch.Tensor
    """`(T, B)` bool: the time step is read for the first time this epoch. False: padding, context, or read again."""

    source_index: torch.Tensor
    """`(T, B)` int64: index into `sources`; -1 is padding."""

    position: torch.Tensor
    """`(T, B)` int64: index of the time step within its stream; -1 is padding. With sections, it counts from the
    source's beginning, too."""

    worker_id: torch.Tensor
    """`(B,)` int64: the worker that reads the lane; 0 with `num_workers=0`."""

    lane: torch.Tensor
    """`(B,)` int64: the lanes' numbers, `0 ... batch_size - 1`; in a part, those of one worker."""

    batch_index: int
    """The batch's number in its epoch, from 0."""

    epoch: int
    """The epoch's number."""

    # These fields use a factory: a default would be a class attribute, and a `_sealed` batch that has not read its
    # message yet would return it.
    is_last: torch.Tensor | None = dataclasses.field(default_factory=lambda: None)
    """`(T, B)` bool: the time step is the last of its stream; not set if an error ended it. None without the dataset's
    `mark_ends=True` or known `lengths`."""

    stream_seed: torch.Tensor = dataclasses.field(default_factory=lambda: cast(torch.Tensor, None))
    """`(T, B)` int64: random bits for draws on the device, the same for all time steps of a source; 0 is padding.

    They depend on (seed, epoch, source). Each pass of `padding_mode="cycle"` counts as an epoch, and they differ each
    time that `interleave(..., exhausted="repeat")` draws a source again. All sections of a source have the same bits,
    in all of its batches, for any number of workers, and after a resume. A batch that is built without them has
    zeros."""

    member: torch.Tensor | None = dataclasses.field(default_factory=lambda: None)
    """`(B,)` int64: the member of `side_by_side` that the lane belongs to, counted from 0; `source_index` counts within
    the member's sources. None for other batches."""

    context: int = dataclasses.field(default_factory=int)
    """Number of time steps that the batch begins with, of the window before: the dataset's `context`."""

    _state: InitVar[Callable[[], dict[str, Any]] | None] = None  # an InitVar: `dataclasses.replace` keeps it
    _kept: InitVar[Kept | None] = None

    def __post_init__(self, _state: Callable[[], dict[str, Any]] | None, _kept: Kept | None) -> None:
        known = {"_state": _state, "_kept": _kept}
        self.__dict__.update({name: value for name, value in known.items() if value is not None})
        shape = self.mask.shape
        if len(shape) != 2 or not shape == self.is_first.shape == self.source_index.shape == self.position.shape:
            shapes = [tuple(t.shape) for t in (self.mask, self.is_first, self.source_index, self.position)]
            raise ValueError(f"mask, is_first, source_index and position must share one shape (T, B), and are {shapes}")
        if self.stream_seed is None:
            self.__dict__["stream_seed"] = torch.zeros_like(self.source_index)
        if self.is_last is not None and self.is_last.shape != shape:
            raise ValueError(f"is_last must have mask's shape {tuple(shape)}, and has {tuple(self.is_last.shape)}")

    def __len__(self) -> int:
        """Number of lanes, B."""
        return self.mask.shape[1]

    @property
    def time_steps(self) -> int:
        """Number of time steps, T."""
        return self.mask.shape[0]

    @property
    def is_padding(self) -> torch.Tensor:
        """`(T, B)` bool: no item was read for the cell. Unlike `~mask`, it is False for items that are read again.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> batch = next(iter(StreamDataLoader(StreamDataset([2, 1], range, batch_size=2, time_steps=2))))
            >>> batch.is_padding.T.tolist()
            [[False, False], [False, True]]
        """
        return self.source_index < 0

    @property
    def worker(self) -> int:
        """The worker that reads all lanes of this batch, for `rnns[part.worker]`: a part has only one.

        Like `host`, this does not wait for the GPU if the bookkeeping is already in host memory.

        Raises:
            ValueError: Several workers read the lanes.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> loader = StreamDataLoader(StreamDataset([2, 2], range, batch_size=2, time_steps=2))
            >>> [part.worker for part in loader.parts()]
            [0]
        """
        workers = sorted(set(self._in_host("worker_id").tolist()))
        if len(workers) != 1:
            what = f"the lanes of this batch are read by workers {workers}"
            raise ValueError(f"{what}; see worker_id, or use loader.parts() for the lanes of one worker")
        return int(workers[0])

    @property
    def host(self) -> StreamBatch:
        """The bookkeeping in host memory: `reset`, `mask`, `source_index` and the others, for decisions and logs.

        Reading a tensor on a GPU (`if batch.reset.any()`) waits for all work that the GPU has queued. A batch that was
        moved by `to`, `cuda`, or the loader's `device` keeps its bookkeeping in host memory, too, so `host` does not
        wait. For any other batch it is copied back. `data` is None.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> batch = next(iter(StreamDataLoader(StreamDataset([2, 1], range, batch_size=2, time_steps=2))))
            >>> batch.to("meta").host.mask.tolist()
            [[True, True], [True, False]]
        """
        there: dict[str, Any] = {name: self._in_host(name) for name in self._bookkeeping()}
        return dataclasses.replace(self, data=None, **there)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> StreamBatch:
        """Return a batch with `function` applied to every tensor, including those in `data`."""
        return self._mapped(function, function)

    def _mapped(
        self, on_data: Callable[[torch.Tensor], torch.Tensor], on_other: Callable[[torch.Tensor], torch.Tensor]
    ) -> StreamBatch:
        changed = {}
        for field in fields(self):
            function = on_data if field.name == "data" else on_other
            changed[field.name] = map_leaves(getattr(self, field.name), functools.partial(_on_tensor, function))
        return dataclasses.replace(self, **changed)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after this batch: a loader that loads it continues with the next batch.

        Raises:
            ValueError: The batch did not come from a `StreamDataLoader`, was pickled, or is a part.
        """
        state: Callable[[], dict[str, Any]] | None = self.__dict__.get("_state")
        if state is None:
            what = "only batches that come straight from a StreamDataLoader know its state"
            raise ValueError(f"{what}; of a batch of collate_lanes, ask sampler.state_dict(batch)")
        return state()

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> StreamBatch:
        """Return a batch whose tensors are on `device`, and whose floating-point data has `dtype`.

        Args:
            device: Target device, as `torch.Tensor.to` takes it; or a dtype, as there.
            dtype: A floating-point dtype. It converts only the floating-point tensors in `data`, not labels, masks,
                positions or other bookkeeping. None converts nothing.
            non_blocking: Copy asynchronously; has an effect from pinned memory to an accelerator.

        Raises:
            TypeError: `dtype` is not a floating-point dtype, or two dtypes are given.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> dataset = StreamDataset([2, 2], lambda n: ({"x": i / 2, "label": i} for i in range(n)), 2, time_steps=2)
            >>> next(iter(StreamDataLoader(dataset))).to(torch.bfloat16).data
            {'x': tensor([[0.0000, 0.0000],
                    [0.5000, 0.5000]], dtype=torch.bfloat16), 'label': tensor([[0, 0],
                    [1, 1]])}
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise TypeError(f"two dtypes are given, {device} and {dtype}; call to(device, dtype)")
            device, dtype = None, device
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype is {dtype}, and to() converts floating-point data only; use map() for all tensors")

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if device is None else tensor.to(device, non_blocking=non_blocking)

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if dtype is None or not tensor.is_floating_point():
                return move(tensor)
            return tensor.to(tensor.device if device is None else device, dtype, non_blocking=non_blocking)

        there = self._mapped(convert, move)
        if there.mask.device.type == "cuda":
            copies.devices.add(there.mask.device.index)
            copies.streams.add(torch.cuda.current_stream(there.mask.device))
        return there._moved_from(self)

    def split_lanes(self, count: int) -> list[StreamBatch]:
        """Split the batch into micro-batches of whole lanes, to accumulate gradients before a step of the optimiser.

        Successive batches are no substitute, as they hold the next windows of the same lanes. Weight each micro-batch's
        mean loss by its share of the steps that count. A `recurrent.RecurrentState` takes them in place of the batch.
        Their `state_dict` is the whole batch's: save it after the last of them.

        Args:
            count: Number of micro-batches, at most B. Their sizes differ by one lane at most.

        Returns:
            Batches whose tensors are views of this one's.

        Raises:
            TypeError: `count` is not an integer.
            ValueError: It is below 1, or above B.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> dataset = StreamDataset([2, 3, 2], lambda n: (10 * n + i for i in range(n)), 3, time_steps=2)
            >>> for micro in next(iter(StreamDataLoader(dataset))).split_lanes(2):
            ...     print(micro.lane.tolist(), micro.data.tolist())
            [0, 1] [[20, 30], [21, 31]]
            [2] [[20], [21]]
        """
        size, longer = divmod(len(self), options.integer("count", count, 1, len(self)))
        begins = [i * size + min(i, longer) for i in range(count + 1)]
        return [self._of_lanes(slice(*ends)) for ends in itertools.pairwise(begins)]

    def without_context(self) -> StreamBatch:
        """Return the batch without its context: only the time steps that continue the batch before.

        The classes in `recurrent` take this, because their states have seen the context's items.

        Returns:
            A batch whose tensors are views of this one's; each call returns the same object. Without context it is this
            batch itself.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> for batch in StreamDataLoader(StreamDataset([4], range, 1, time_steps=2, context=1)):
            ...     print(batch.data.T.tolist(), batch.mask.T.tolist(), batch.without_context().data.T.tolist())
            [[0, 0, 1]] [[False, True, True]] [[0, 1]]
            [[1, 2, 3]] [[False, True, True]] [[2, 3]]
        """
        if not self.context:
            return self
        if "_continuing" not in self.__dict__:
            self.__dict__["_continuing"] = dataclasses.replace(self._from_step(self.context), context=0)
        found: StreamBatch = self.__dict__["_continuing"]
        return found

    def flatten_lanes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay the lanes of a tensor of the batch end to end in one row, as `cu_seqlens` counts them.

        Args:
            tensor: `(T, B, ...)`: the data or a leaf of it, `mask`, or a model's output for them.

        Returns:
            `(1, B * T, ...)`: lane 0's T steps, then lane 1's, and so on. flash-attention takes it without the leading
            1: `[0]`.

        Raises:
            TypeError: `tensor` is not a tensor.
            ValueError: It is not `(T, B, ...)`.
        """
        steps, lanes = _checked(tensor, tuple(self.is_first.shape), "(T, B, ...)", "flatten_lanes")
        return tensor.transpose(0, 1).reshape(1, lanes * steps, *tensor.shape[2:])

    def unflatten_lanes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undo `flatten_lanes`.

        Args:
            tensor: `(1, B * T, ...)`.

        Returns:
            `(T, B, ...)`, a view if torch can make one.

        Raises:
            TypeError: `tensor` is not a tensor.
            ValueError: It is not `(1, B * T, ...)`.
        """
        steps, lanes = self.is_first.shape
        _checked(tensor, (1, lanes * steps), "(1, B * T, ...)", "unflatten_lanes")
        return tensor.reshape(lanes, steps, *tensor.shape[2:]).transpose(0, 1)

    def cuda(self, device: torch.device | int | None = None, *, non_blocking: bool = False) -> StreamBatch:
        """Return a batch whose tensors are on a CUDA device, by default the current one; see `to`."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def cpu(self) -> StreamBatch:
        """Return a batch whose tensors are in host memory; see `to`."""
        return self.to("cpu")

    def pin_memory(self, device: Any = None) -> StreamBatch:  # noqa: ARG002
        """Return a batch in page-locked memory, from which copies to an accelerator are fast.

        Args:
            device: Ignored; torch's pinning passes it. The memory is pinned for the current accelerator.
        """
        return self.map(lambda tensor: tensor.pin_memory() if is_dense(tensor) else tensor)

    def __copy__(self) -> StreamBatch:
        """Return a batch of the same tensors, with the same `state_dict`."""
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamBatch:
        """Return a batch of copies of the tensors, with the same `state_dict`."""
        copied = {field.name: copy.deepcopy(getattr(self, field.name), memo) for field in fields(self)}
        return dataclasses.replace(self, **copied)

    def __repr__(self) -> str:
        host = self.host.without_context()
        return (
            f"StreamBatch(batch_index={self.batch_index}, epoch={self.epoch}, time_steps={self.time_steps}, "
            f"lanes={len(self)}, data={describe(self.data)}, resets={int(host.reset.sum())}, "
            f"padding={1 - float(host.mask.float().mean()):.0%}, worker_id={sorted(set(host.worker_id.tolist()))})"
        )

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: a row per lane, with thumbnails of pictures; at most 100 kB."""
        return page(self._html, self.__repr__)

    def _html(self) -> str:
        return batch_html(self.host, [(name, describe(leaf), _seen(leaf)) for name, leaf in named_leaves(self.data)])


def _seen(leaf: Any) -> Any:
    """Return a leaf if its values can be shown, or None."""
    return leaf if type(leaf) is list or (isinstance(leaf, torch.Tensor) and is_dense(leaf)) else None


def _on_tensor(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    return function(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _checked(tensor: object, shape: tuple[int, ...], form: str, method: str) -> tuple[int, ...]:
    """Return `shape` after checking that the tensor's first dimensions have it."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{method} takes a tensor {form}, not a {type(tensor).__name__}; pass each leaf by itself")
    if tuple(tensor.shape[:2]) != shape:
        raise ValueError(f"{method} takes a tensor {form} that begins with {shape}, and got {tuple(tensor.shape)}")
    return shape
