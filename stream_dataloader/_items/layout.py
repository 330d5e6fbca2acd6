"""What the leaves of items look like, and whether one item is like another.

A `Layout` is what all items of a batch must share: the structure, and each leaf's dtype and shape. A leaf that a dense
tensor cannot hold (a string, a list, a sparse tensor, a masked array, any other object) has no dtype.

Guarantee: `Layout.read` gives exactly the leaves that `Layout.build` needs, or raises `Misfit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ma  # here, as `np.ma` has NumPy load it when first asked: a tenth of a second in each new worker

from stream_dataloader._items.structure import LEAF, Misfit, Node, collect, flatten, leaf_paths, types_of, unflatten

Leaves = Sequence[Any]

#: The torch dtypes that NumPy has too.
DTYPES_OF_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_TORCH_OF_NUMPY = {dtype: torch_dtype for torch_dtype, dtype in DTYPES_OF_NUMPY.items()}

#: The torch dtype of a NumPy dtype, None if there is none.
torch_dtype_of = _TORCH_OF_NUMPY.get

#: The torch dtype that Python's own numbers become.
TORCH_OF_NUMBER = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


#: Larger arrays travel between processes as shared memory, which costs a file, a mapping and page faults.
INLINE_BYTES = 1 << 18


class Spec(NamedTuple):
    """What a leaf looks like: torch dtype (None: an object, kept as it is) and shape, for one time step."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    timed: bool = True  # False: a leaf without a time axis, which holds for the whole window

    def __str__(self) -> str:
        if self.dtype is None:
            return "an object" if self.timed else "one object for the whole window"
        kind = f"{str(self.dtype).removeprefix('torch.')} {self.shape}"
        return kind if self.timed else f"{kind} for the whole window"


def storage_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype that holds the bits of `dtype`: itself, or unsigned integers for bfloat16 and the like."""
    known = DTYPES_OF_NUMPY.get(dtype)
    return np.dtype(f"u{dtype.itemsize}") if known is None else known


def as_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """`array`, whose dtype is `storage_dtype(dtype)`, as a tensor of `dtype` over the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def as_array(leaf: Any) -> Any:
    """A leaf as numpy can copy it: tensors become arrays over the same memory."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach().cpu().resolve_conj().resolve_neg()  # numpy has no bits for "conjugated" and "negated"
    if tensor.dtype in DTYPES_OF_NUMPY:
        return tensor.numpy()
    bits = getattr(torch, f"uint{8 * tensor.element_size()}")
    return tensor.view(bits).numpy()


@lru_cache(maxsize=64)
def _can_be_filled(dtype: torch.dtype) -> bool:
    """Whether torch can write numbers of a dtype: not those that it only moves (`uint4`, `bits8`, ...)."""
    if dtype in DTYPES_OF_NUMPY:
        return True
    try:
        torch.zeros((), dtype=torch.float32, device="cpu").to(dtype)
    except (RuntimeError, TypeError):
        return False
    return True


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what its shape and dtype say: not sparse, nested, quantized, masked or without data."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def spec_of(leaf: Any) -> Spec:
    """The spec of one time step's leaf."""
    if isinstance(leaf, torch.Tensor):
        dense = is_dense(leaf) and _can_be_filled(leaf.dtype)
        return Spec(leaf.dtype, tuple(leaf.shape)) if dense else Spec(None, ())
    if isinstance(leaf, (np.ndarray, np.generic)):
        if isinstance(leaf, ma.MaskedArray):  # a tensor has no mask to keep
            return Spec(None, ())
        dtype = torch_dtype_of(leaf.dtype.newbyteorder("="))  # copied into a column, it is native
        return Spec(None, ()) if dtype is None else Spec(dtype, tuple(leaf.shape))
    return Spec(TORCH_OF_NUMBER.get(type(leaf)), ())


def window_spec_of(leaf: Any) -> Spec:
    """The spec of a window's leaf: without its time axis, the first, if it has one."""
    if type(leaf) is list:
        return Spec(None, ())
    spec = spec_of(leaf)
    timed = spec.dtype is not None and len(spec.shape) > 0
    return Spec(spec.dtype, spec.shape[1:], timed) if timed else spec._replace(timed=False)


def _unreadable(item: Any, error: Exception) -> Misfit:
    """The error for an item whose type raises when its parts are read."""
    return Misfit(f"the item, a {type(item).__name__}, cannot be read: {type(error).__name__}: {error}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Structure and leaf specs of an item or window: what must be alike for items to share a tensor."""

    structure: Node
    specs: tuple[Spec, ...]
    windowed: bool

    @classmethod
    def of(cls, item: Any, windowed: bool) -> tuple[Layout, list[Any]]:
        """The layout of `item`, and its leaves as arrays; `windowed`: leaves lead with a time axis."""
        try:
            structure, leaves = flatten(item)
            find: Callable[[Any], Spec] = window_spec_of if windowed else spec_of
            layout = cls(structure, tuple(find(leaf) for leaf in leaves), windowed)
            if windowed:
                layout.window_length(leaves)
            return layout, [
                leaf if spec.dtype is None else as_array(leaf) for leaf, spec in zip(leaves, layout.specs, strict=True)
            ]
        except Misfit:
            raise
        except Exception as error:
            raise _unreadable(item, error) from error

    def read(self, item: Any) -> Leaves:
        """The leaves of `item` as arrays, in this layout's order."""
        dtype, shape = self._array_alone
        if dtype is not None:  # the most frequent items, in less time
            array = item
            if type(item) is torch.Tensor:
                try:
                    array = item.numpy()
                except (RuntimeError, TypeError):  # bfloat16, or on a GPU, sparse, nested, part of a graph
                    array = None
            is_array = type(array) is np.ndarray and array.dtype == dtype and array.ndim == self.windowed + len(shape)
            if is_array and array.shape[self.windowed :] == shape:
                return (array,)
        try:
            leaves: list[Any] = []
            collect(item, self.structure, "", leaves)
            find = window_spec_of if self.windowed else spec_of
            for i, leaf in enumerate(leaves):
                spec = find(leaf)
                if spec != self.specs[i]:
                    raise Misfit(f"{self.paths[i]} is {spec}, and was {self.specs[i]}")
                if spec.dtype is not None and isinstance(leaf, torch.Tensor):
                    leaves[i] = as_array(leaf)
            return leaves
        except Misfit:
            raise
        except Exception as error:
            raise _unreadable(item, error) from error

    @cached_property
    def _array_alone(self) -> tuple[np.dtype[Any] | None, tuple[int, ...]]:
        """What an item that is one array must be; no dtype, where items are something else."""
        spec = self.specs[0] if self.structure is LEAF else Spec(None, ())
        dtype = None if spec.dtype is None or not spec.timed else DTYPES_OF_NUMPY.get(spec.dtype)
        return dtype, spec.shape

    def window_length(self, leaves: Leaves) -> int:
        if len(leaves) == 1 and self.specs[0].timed:
            return len(leaves[0])
        # backwards, so that of each length the first leaf is kept, for the message
        lengths = {len(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if self.specs[i].timed}
        if not lengths:
            there = ", ".join(f"{path} is {spec}" for path, spec in zip(self.paths, self.specs, strict=True))
            raise Misfit(f"no leaf of the window has a time axis ({there}); pass time_steps= for single steps")
        if len(lengths) > 1:
            parts = ", ".join(f"{self.paths[i]} has {n}" for n, i in sorted(lengths.items(), key=lambda p: p[1]))
            raise Misfit(f"the leaves of one window have different numbers of steps: {parts}")
        return int(next(iter(lengths)))

    @cached_property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Each leaf's dtype, None for objects."""
        return tuple([spec.dtype for spec in self.specs])

    @cached_property
    def foreign(self) -> list[tuple[int, torch.dtype]]:
        """The leaves of dtypes that NumPy has not."""
        return [
            (i, spec.dtype) for i, spec in enumerate(self.specs) if spec.dtype and spec.dtype not in DTYPES_OF_NUMPY
        ]

    @cached_property
    def _keys_alone(self) -> tuple[Any, ...] | None:
        """The keys, where items are dicts of leaves in order."""
        flat = self.structure.type is dict and all(child is LEAF for child in self.structure.children)
        return self.structure.keys if flat and self.structure.order is None else None

    @cached_property
    def paths(self) -> list[str]:
        return leaf_paths(self.structure)

    def build(self, leaves: Iterable[Any]) -> Any:
        """An item of this structure with other leaves, one for each of `specs`."""
        if self._keys_alone is not None:  # the most frequent structure, in less time
            return dict(zip(self._keys_alone, leaves, strict=True))
        return next(iter(leaves)) if self.structure.type is None else unflatten(self.structure, iter(leaves))

    def difference(self, other: Layout) -> str:
        """Says how `other` differs from this layout; empty if it does not."""
        if self.structure != other.structure:
            if self.paths != other.paths:
                return f"it has leaves {other.paths}, and the first had {self.paths}"
            return f"it nests its leaves in {types_of(other.structure)}, and the first in {types_of(self.structure)}"
        for path, ours, theirs in zip(self.paths, self.specs, other.specs, strict=True):
            if ours != theirs:
                are_pictures = ours.dtype == theirs.dtype and len(ours.shape) == len(theirs.shape) == 3
                size = "; size=(height, width) of VideoStream and ImageFolderStream gives pictures one size"
                return f"{path} is {theirs}, and in the first was {ours}{size if are_pictures else ''}"
        return ""
