"""Writes the single steps of a stream into columns in one go, by a function made for what its items look like.

`Layout.read` walks each item's structure anew and works out what each leaf is. That takes many times as long as to copy
a small leaf. Once the layout is known, all that an item must be is known too. So a flat function is written for it, as
`dataclasses` writes an `__init__`. For items `{"done": bool, "image": (64,) float32}` it comes to this::

    def write(stream, t, stop, columns, row):
        begin = t
        column0 = columns[0][:, row]
        column1 = columns[1][:, row]
        try:
            while t < stop:
                item = value = next(stream)
                try:
                    if type(value) is not dict or len(value) != 2: return Taken(t - begin, (item,))
                    value0 = value["done"]
                    value1 = value["image"]
                    ...  # the type, dtype and shape of each leaf; if they are others: the same
                    column0[t] = value0
                    column1[t] = value1
                except Exception:
                    return Taken(t - begin, (item,))
                t += 1
        except BaseException as error:
            return Taken(t - begin, (), error)
        return Taken(t - begin)

Nothing of the items is in the source: keys, types, dtypes and shapes are names in it, whose values are handed to it.

Guarantee: what is written is what `Layout.read` would give. An item that is not plainly like the layout, or that
raises, is given back, for `Layout.read` to accept or to tell how it differs. Each item is copied before the next is
taken, as a stream may use one buffer for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from stream_dataloader._items.layout import (
    DTYPES_OF_NUMPY,
    TORCH_OF_NUMBER,
    Layout,
    Spec,
    as_array,
    is_dense,
    spec_of,
    torch_dtype_of,
)
from stream_dataloader._items.structure import Node


class Taken(NamedTuple):
    """What came of taking items from a stream in one go.

    Attributes:
        written: How many were written.
        odd: The item behind them, if it was taken and not written.
        error: What the stream raised instead of an item, if it did: `StopIteration` at its end.
    """

    written: int
    odd: tuple[Any, ...] = ()
    error: BaseException | None = None


#: Called with a stream, `t`, `stop`, columns and `row`: takes items as long as they are like the layout, and writes
#: them to time steps `[t, stop)` of the row.
StepWriter = Callable[[Iterator[Any], int, int, Sequence[Any], int], Taken]

_NUMBERS = {dtype: number for number, dtype in TORCH_OF_NUMBER.items()}
_OBJECTS = frozenset([str, bytes, list, tuple, dict, type(None)])  # the most frequent types that no tensor holds

_TEMPLATE = """
def write(stream, t, stop, columns, row):
    begin = t
    {views}
    try:
        while t < stop:
            item = value = next(stream)
            try:
                {checks}
                {writes}
            except Exception:
                return Taken(t - begin, (item,))
            t += 1
    except BaseException as error:
        return Taken(t - begin, (), error)
    return Taken(t - begin)
"""
_ODD = "return Taken(t - begin, (item,))"


def step_writer(layout: Layout) -> StepWriter:
    """The function for a layout of single steps."""
    source = _Source(layout)
    names = dict(source.names)
    exec(source.text(), names)  # noqa: S102
    writer: StepWriter = names["write"]
    return writer


class _Source:
    """The source of a function for a layout.

    Attributes:
        names: What its names stand for.
    """

    def __init__(self, layout: Layout) -> None:
        self.names: dict[str, Any] = {
            "Array": np.ndarray,
            "Tensor": torch.Tensor,
            "Taken": Taken,
            "objects": _OBJECTS,
            "as_array": as_array,
            "is_dense": is_dense,
            "spec_of": spec_of,
            "torch_dtype_of": torch_dtype_of,
        }
        self._views: list[str] = []
        self._checks: list[str] = []
        self._writes: list[str] = []
        self._values = 0
        self._add("value", layout.structure, iter(layout.specs))

    def text(self) -> str:
        """All of it."""
        inner = "\n" + 16 * " "
        return _TEMPLATE.format(
            views="\n    ".join(self._views), checks=inner.join(self._checks), writes=inner.join(self._writes)
        )

    def _name(self, known: Any) -> str:
        """A name that stands for what is known beforehand."""
        name = f"known{len(self.names)}"
        self.names[name] = known
        return name

    def _add(self, value: str, node: Node, specs: Iterator[Spec]) -> None:
        """Check a leaf, or a container and all that is in it, in the order of `structure.collect`."""
        kind = node.type
        if kind is None:
            self._add_leaf(value, next(specs))
            return
        children = [f"value{self._values + i}" for i in range(len(node.children))]
        self._values += len(children)
        self._checks.append(f"if type({value}) is not {self._name(kind)}: {_ODD}")
        if issubclass(kind, tuple):
            self._checks.append(f"({''.join(f'{child}, ' for child in children)}) = {value}")  # raises if it has more
        else:
            if kind is dict:
                self._checks.append(f"if len({value}) != {len(children)}: {_ODD}")
            read = "{}[{}]" if kind is dict else "getattr({}, {})"
            for child, key in zip(children, node.keys, strict=True):
                self._checks.append(f"{child} = {read.format(value, self._name(key))}")
        for child, below in zip(children, node.children, strict=True):
            self._add(child, below, specs)

    def _add_leaf(self, leaf: str, spec: Spec) -> None:
        """Check a leaf, and write it."""
        i = len(self._views)
        if spec.dtype is None:
            self._views.append(f"column{i} = columns[{i}]")
            self._checks.append(f"if type({leaf}) not in objects and spec_of({leaf}).dtype is not None: {_ODD}")
            self._writes.append(f"column{i}[t][row] = {leaf}")
            return
        self._views.append(f"column{i} = columns[{i}][:, row]")
        self._writes.append(f"column{i}[t] = {leaf}")
        dtype, shape, native = self._name(spec.dtype), self._name(spec.shape), DTYPES_OF_NUMPY.get(spec.dtype)
        self._checks += [
            f"kind = type({leaf})",
            "if kind is Array:",
            f"    if {leaf}.shape != {shape}: {_ODD}",
            # of an array that was pickled the dtype is equal, but not the same
            f"    if {leaf}.dtype is not {self._name(native)} and torch_dtype_of({leaf}.dtype) is not {dtype}: {_ODD}",
            "elif kind is Tensor:",
            f"    if {leaf}.dtype is not {dtype} or {leaf}.shape != {shape}: {_ODD}",
        ]
        if native is None:
            self._checks += [f"    if not is_dense({leaf}): {_ODD}", f"    {leaf} = as_array({leaf})"]
        else:
            self._checks.append(f"    {leaf} = {leaf}.numpy()")  # raises if it is sparse, on a GPU, part of a graph
        scalars = [] if spec.shape or native is None else [*filter(None, [_NUMBERS.get(spec.dtype)]), native.type]
        unlike = " and ".join(f"kind is not {self._name(scalar)}" for scalar in scalars)
        self._checks.append(f"elif {unlike}: {_ODD}" if scalars else f"else: {_ODD}")
