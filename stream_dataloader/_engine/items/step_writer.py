"""Generated functions that write a stream's steps in one go, or whole windows, for one layout.

`Layout.read` walks each item's structure anew. Once the structure is known, a flat function is generated from
`_TEMPLATE`. Items `{"done": bool, "image": (8, 8, 3) uint8}` are written by::

    if type(value) is not dict or len(value) != 2: return Taken(t - begin, (item,))
    value0 = value["done"]
    ...  # the type, dtype and shape of each leaf; if they are others: the same
    column0[t] = value0

The bytes of small arrays are gathered, and written together.

Guarantee: items are written exactly as `Layout.read` would return them; an item of another layout is handed back. Each
item is copied before the next one is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from stream_dataloader._engine.items.layout import (
    DTYPES_OF_NUMPY,
    TORCH_OF_NUMBER,
    Layout,
    Spec,
    as_array,
    is_dense,
    spec_of,
    torch_dtype_of,
)
from stream_dataloader._engine.items.objects import FIXED, lasting
from stream_dataloader._engine.items.structure import Misfit, Node, children_of


class Taken(NamedTuple):
    """Result of taking items from a stream in one go.

    Attributes:
        written: Number of items written.
        odd: The item after those written, if it was taken and has another layout.
        error: The error that was raised instead of an item; `StopIteration` at the stream's end.
    """

    written: int
    odd: tuple[Any, ...] = ()
    error: BaseException | None = None


#: Called with a stream, `begin`, `stop`, columns and `row`: takes items as long as they have the layout, and writes
#: them to time steps `[begin, stop)` of the row.
StepWriter = Callable[[Iterator[Any], int, int, Sequence[Any], int], Taken]

#: The column of a leaf, the bytes of its time steps, its dtype and its shape.
_Gathered: TypeAlias = tuple[np.ndarray[Any, Any], list[bytes], np.dtype[Any], tuple[int, ...]]

_NUMBERS = {dtype: number for number, dtype in TORCH_OF_NUMBER.items()}
_OBJECTS = frozenset([str, bytes, list, type(None)])  # the most frequent types of leaves without a dtype

_MOST_GATHERED_BYTES = 256  # up to this size of an array, gathering 64 of them takes three quarters of the time
_LEAST_GATHERED_STEPS = 32

_TEMPLATE = """
def write(stream, begin, stop, columns, row):
    t = begin
    {views}
    gathered = ({gathered})
    try:
        for t in range(begin, stop):
            item = value = next(stream)
            try:
                {checks}
                {writes}
            except Exception as error:
                return Taken(t - begin, *blamed(layout, item, error))
    except BaseException as error:
        return Taken(t - begin, (), error)
    finally:
        write_rows(begin, gathered)
    return Taken(stop - begin)
"""
#: Called with a window, columns, `row` and `room`: writes it and returns its number of steps; 0 if it has another
#: layout, or if there is no room.
WindowWriter = Callable[[Any, Sequence[Any], int, int], int]

_WINDOW_TEMPLATE = """
def write(item, columns, row, room):
    value = item
    {views}
    try:
        {checks}
        if not 0 < count <= room: return 0
        {writes}
    except Exception as error:
        if blamed(layout, item, error)[1] is not None: raise
        return 0
    return count
"""


def step_writer(layout: Layout, time_steps: int) -> StepWriter:
    """Generate the function for a layout of single steps, and windows of `time_steps`."""
    writer: StepWriter = _Source(layout, time_steps).compiled(_TEMPLATE, 16, "return Taken(t - begin, (item,))")
    return writer


def window_writer(layout: Layout) -> WindowWriter:
    """Generate the function for a layout of windows."""
    if layout.has_objects:
        return lambda *_: 0
    writer: WindowWriter = _Source(layout, 0).compiled(_WINDOW_TEMPLATE, 8, "return 0")
    return writer


def _blamed(layout: Layout, item: Any, error: Exception) -> tuple[tuple[Any, ...], Exception | None]:
    """Attribute an error in the middle of an item: return the item if it does not fit, otherwise the error.

    The error may come from a signal handler that ran at that moment.
    """
    if isinstance(error, OverflowError):  # the number is reported when this item is written by itself
        return (item,), None
    try:
        layout.read(item)
    except Misfit:
        return (item,), None
    return (), error


def _is_object(leaf: Any) -> bool:
    return spec_of(leaf).dtype is None and children_of(leaf) is None


def _write_rows(begin: int, gathered: Iterable[_Gathered]) -> None:
    """Write gathered bytes; a function of its own, because Python compiles a copy of a `finally` for each return."""
    for column, leaves, dtype, shape in gathered:
        if leaves:
            column[begin : begin + len(leaves)] = np.frombuffer(b"".join(leaves), dtype).reshape(-1, *shape)


@functools.lru_cache(maxsize=64)
def _code_of(text: str) -> CodeType:
    """Compile a function; cached, as each epoch's readers need those of the epoch before, and this takes most time."""
    return compile(text, "<step writer>", "exec")


class _Source:
    """Source text of a function for a layout; `names` holds the objects that its names refer to."""

    def __init__(self, layout: Layout, time_steps: int) -> None:
        self._gathers, self._windowed = time_steps >= _LEAST_GATHERED_STEPS, layout.windowed
        self.names: dict[str, Any] = {
            "Array": np.ndarray,
            "Tensor": torch.Tensor,
            "Taken": Taken,
            "objects": _OBJECTS,
            "fixed": FIXED,
            "lasting": lasting,
            "as_array": as_array,
            "is_dense": is_dense,
            "is_object": _is_object,
            "torch_dtype_of": torch_dtype_of,
            "blamed": _blamed,
            "layout": layout,
            "write_rows": _write_rows,
        }
        self._views: list[str] = []
        self._checks: list[str] = []
        self._writes: list[str] = []
        self._gathered: list[str] = []
        self._values, self._counted = 0, False
        self._add("value", layout.structure, iter(layout.specs))

    def compiled(self, template: str, indent: int, odd: str) -> Any:
        """Compile the function; `odd` is its statement for items of another layout."""
        inner = "\n" + indent * " "
        text = template.format(
            views="\n    ".join(self._views),
            checks=inner.join(self._checks),
            writes=inner.join(self._writes),
            gathered="".join(self._gathered),
        )
        exec(_code_of(text.replace("ODD", odd)), self.names)  # noqa: S102
        return self.names["write"]

    def _name(self, known: Any) -> str:
        name = f"known{len(self.names)}"
        self.names[name] = known
        return name

    def _add(self, value: str, node: Node, specs: Iterator[Spec]) -> None:
        kind = node.type
        if kind is None:
            self._add_leaf(value, next(specs))
            return
        children = [f"value{self._values + i}" for i in range(len(node.children))]
        self._values += len(children)
        self._checks.append(f"if type({value}) is not {self._name(kind)}: ODD")
        if issubclass(kind, tuple):
            self._checks.append(f"({''.join(f'{child}, ' for child in children)}) = {value}")  # raises if it has more
        else:
            if kind is dict:
                self._checks.append(f"if len({value}) != {len(children)}: ODD")
            read = "{}[{}]" if kind is dict else "getattr({}, {})"
            for child, key in zip(children, node.keys, strict=True):
                self._checks.append(f"{child} = {read.format(value, self._name(key))}")
        for child, below in zip(children, node.children, strict=True):
            self._add(child, below, specs)

    def _add_leaf(self, leaf: str, spec: Spec) -> None:
        i = len(self._writes)
        if spec.dtype is None:
            self._views.append(f"column{i} = columns[{i}]")
            self._checks.append(f"if type({leaf}) not in objects and not is_object({leaf}): ODD")
            self._writes.append(f"column{i}[t][row] = {leaf} if type({leaf}) in fixed else lasting({leaf})")
            return
        native, size = DTYPES_OF_NUMPY.get(spec.dtype), spec.dtype.itemsize * math.prod(spec.shape)
        dtype, shape, stored = f"dtype{i}", f"shape{i}", f"stored{i}"
        self.names |= {dtype: spec.dtype, shape: spec.shape, stored: native}
        self._views.append(f"column{i} = columns[{i}][:, row]")
        if self._gathers and native is not None and spec.shape and 0 < size <= _MOST_GATHERED_BYTES:
            self._views.append(f"bytes{i} = []")
            self._writes.append(f"bytes{i}.append({leaf}.tobytes())")
            self._gathered.append(f"(column{i}, bytes{i}, {stored}, {shape}), ")
        else:
            self._writes.append(f"column{i}[{':count' if self._windowed else 't'}] = {leaf}")
        timed = self._windowed and spec.timed
        there = f"{leaf}.shape[1:]" if timed else f"{leaf}.shape"
        self._checks += [f"kind = type({leaf})", "if kind is Tensor:"]
        if native is None:
            self._checks += [
                f"    if {leaf}.dtype is not {dtype} or {there} != {shape} or not is_dense({leaf}): ODD",
                f"    {leaf} = as_array({leaf})",
                "else: ODD",
            ]
        else:
            self._checks += [
                f"    try: {leaf} = {leaf}.numpy()",
                "    except (RuntimeError, TypeError): ODD",  # sparse, on a GPU, part of a graph
                "    kind = Array",
                "if kind is Array:",
                f"    if {there} != {shape}: ODD",
                # The dtype of an unpickled array is equal to the known one, but another object.
                f"    if {leaf}.dtype is not {stored} and torch_dtype_of({leaf}.dtype) is not {dtype}: ODD",
            ]
            scalars = [] if spec.shape or timed else [*filter(None, [_NUMBERS.get(spec.dtype)]), native.type]
            unlike = " and ".join(f"kind is not {self._name(scalar)}" for scalar in scalars)
            self._checks.append(f"elif {unlike}: ODD" if scalars else "else: ODD")
        if timed:
            self._checks.append(f"if len({leaf}) != count: ODD" if self._counted else f"count = len({leaf})")
            self._counted = True
