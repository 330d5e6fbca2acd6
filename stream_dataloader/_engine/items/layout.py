"""Layouts: the structure of items, with each leaf's dtype and shape, and comparison of items with them.

All items of a batch must share a `Layout`. A leaf that a dense tensor cannot hold (a string, a list, a sparse tensor, a
masked array, any other object) has no dtype.

Guarantee: `Layout.read` gives exactly the leaves that `Layout.build` needs, or raises `Misfit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ma  # imported here, as NumPy would load `np.ma` at its first use, for 0.1 s in each new worker

from stream_dataloader._engine.items.structure import (
    LEAF,
    Misfit,
    Node,
    children_of,
    collect,
    flatten,
    leaf_paths,
    types_of,
    unflatten,
)
from stream_dataloader.protocols import NOTHING_YET

Leaves = Sequence[Any]

#: The torch dtypes that NumPy also has.
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

#: The torch dtype of Python's own numbers.
TORCH_OF_NUMBER = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


#: Larger arrays travel between processes as shared memory, which costs a file, a mapping and page faults.
INLINE_BYTES = 1 << 18


class Spec(NamedTuple):
    """Dtype and shape of a leaf, for one time step.

    Attributes:
        dtype: The torch dtype; None: an object, kept unchanged.
        shape: The shape.
        timed: Whether the leaf has a time axis; without one it applies to the whole window.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    timed: bool = True

    def __str__(self) -> str:
        if self.dtype is None:
            return "an object" if self.timed else "one object for the whole window"
        kind = f"{str(self.dtype).removeprefix('torch.')} {self.shape}"
        return kind if self.timed else f"{kind} for the whole window"


def storage_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the numpy dtype that holds the bits of `dtype`: itself, or unsigned integers for bfloat16 and the like."""
    known = DTYPES_OF_NUMPY.get(dtype)
    return np.dtype(f"u{dtype.itemsize}") if known is None else known


def as_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return `array`, whose dtype is `storage_dtype(dtype)`, as a tensor of `dtype` over the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def as_array(leaf: Any) -> Any:
    """Return a leaf that numpy can copy: tensors become arrays over the same memory."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach().cpu().resolve_conj().resolve_neg()  # numpy has no flags for "conjugated" and "negated"
    if tensor.dtype in DTYPES_OF_NUMPY:
        return tensor.numpy()
    bits = getattr(torch, f"uint{8 * tensor.element_size()}")
    return tensor.view(bits).numpy()


@lru_cache(maxsize=64)
def _can_be_filled(dtype: torch.dtype) -> bool:
    """Return whether torch can write numbers of a dtype, which it cannot for `uint4`, `bits8` and others."""
    if dtype in DTYPES_OF_NUMPY:
        return True
    try:
        torch.zeros((), dtype=torch.float32, device="cpu").to(dtype)
    except (RuntimeError, TypeError):
        return False
    return True


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fully described by shape and dtype: not sparse, nested, quantized, masked or empty.

    Empty means a meta tensor, which has no data.
    """
    return (
        tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def spec_of(leaf: Any) -> Spec:
    """Return the spec of one time step's leaf."""
    if isinstance(leaf, torch.Tensor):
        dense = is_dense(leaf) and _can_be_filled(leaf.dtype)
        return Spec(leaf.dtype, tuple(leaf.shape)) if dense else Spec(None, ())
    if isinstance(leaf, (np.ndarray, np.generic)):
        if isinstance(leaf, ma.MaskedArray):  # a tensor would lose the mask
            return Spec(None, ())
        dtype = torch_dtype_of(leaf.dtype.newbyteorder("="))  # a copy into a column has native byte order
        return Spec(None, ()) if dtype is None else Spec(dtype, tuple(leaf.shape))
    if leaf is NOTHING_YET:
        raise Misfit("NOTHING_YET is a part of an item; yield it in place of the whole item")
    return Spec(TORCH_OF_NUMBER.get(type(leaf)), ())


def window_spec_of(leaf: Any) -> Spec:
    """Return the spec of a window's leaf, without its leading time axis, if it has one."""
    if type(leaf) is list:
        return Spec(None, ())
    spec = spec_of(leaf)
    timed = spec.dtype is not None and len(spec.shape) > 0
    return Spec(spec.dtype, spec.shape[1:], timed) if timed else spec._replace(timed=False)


def _unreadable(item: Any, error: Exception) -> Misfit:
    """Create the error for an item that raises when its parts are read."""
    return Misfit(f"the item, a {type(item).__name__}, cannot be read: {type(error).__name__}: {error}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Structure and leaf specs of an item or window, which must be equal for items to share a tensor."""

    structure: Node
    specs: tuple[Spec, ...]
    windowed: bool

    @classmethod
    def of(cls, item: Any, windowed: bool) -> tuple[Layout, list[Any]]:
        """Return the layout of `item`, and its leaves as arrays; `windowed`: leaves have a leading time axis."""
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
        """Return the leaves of `item` as arrays, in this layout's order; raise `Misfit` if it has another layout."""
        dtype, shape = self._array_alone
        if dtype is not None:  # a shortcut for the most frequent items
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
                if spec.dtype is None and children_of(leaf) is not None:
                    # As the first item of a stream it would be taken apart, so it depended on what was read before.
                    parts = f"a {type(leaf).__name__}, whose parts are leaves of their own"
                    raise Misfit(
                        f"{self.paths[i]} is {parts}, and was {self.specs[i]}; a list around it keeps it whole"
                    )
                if spec.dtype is not None and isinstance(leaf, torch.Tensor):
                    leaves[i] = as_array(leaf)
            return leaves
        except Misfit:
            raise
        except Exception as error:
            raise _unreadable(item, error) from error

    @cached_property
    def _array_alone(self) -> tuple[np.dtype[Any] | None, tuple[int, ...]]:
        """Dtype and shape of items that are a single array; None as dtype if items are anything else."""
        spec = self.specs[0] if self.structure is LEAF else Spec(None, ())
        dtype = None if spec.dtype is None or not spec.timed else DTYPES_OF_NUMPY.get(spec.dtype)
        return dtype, spec.shape

    def window_length(self, leaves: Leaves) -> int:
        if len(leaves) == 1 and self.specs[0].timed:
            return len(leaves[0])
        # Walked backwards, so that for each length the first leaf is kept, which the message names.
        lengths = {len(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if self.specs[i].timed}
        if not lengths:
            there = ", ".join(f"{path} is {spec}" for path, spec in zip(self.paths, self.specs, strict=True))
            raise Misfit(f"no leaf of the window has a time axis ({there}); pass time_steps= for single steps")
        if len(lengths) > 1:
            parts = ", ".join(f"{self.paths[i]} has {n}" for n, i in sorted(lengths.items(), key=lambda p: p[1]))
            raise Misfit(f"the leaves of one window have different numbers of steps: {parts}")
        return int(next(iter(lengths)))

    @cached_property
    def has_objects(self) -> bool:
        """Whether some leaf has no dtype."""
        return any(spec.dtype is None for spec in self.specs)

    @cached_property
    def foreign(self) -> list[tuple[int, torch.dtype]]:
        """The leaves whose dtypes NumPy does not have."""
        return [
            (i, spec.dtype) for i, spec in enumerate(self.specs) if spec.dtype and spec.dtype not in DTYPES_OF_NUMPY
        ]

    @cached_property
    def _keys_alone(self) -> tuple[Any, ...] | None:
        """The keys if items are flat dicts with sorted keys; None otherwise."""
        flat = self.structure.type is dict and all(child is LEAF for child in self.structure.children)
        return self.structure.keys if flat and self.structure.order is None else None

    @cached_property
    def paths(self) -> list[str]:
        return leaf_paths(self.structure)

    def build(self, leaves: Iterable[Any]) -> Any:
        """Build an item of this structure from leaves, one for each of `specs`."""
        if self._keys_alone is not None:  # a shortcut for the most frequent structure
            return dict(zip(self._keys_alone, leaves, strict=True))
        return next(iter(leaves)) if self.structure.type is None else unflatten(self.structure, iter(leaves))

    def difference(self, other: Layout) -> str:
        """Describe how `other` differs from this layout; empty if it does not."""
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
