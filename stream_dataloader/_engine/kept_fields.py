"""`KeptFields`: hidden content of a batch: fields that are made on request, host copies, the loader's state.

Guarantee: a field is the same tensor at each access, in any thread.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from stream_dataloader._engine.hints import field_hint
from stream_dataloader._engine.items.bookkeeping import Bookkeeping
from stream_dataloader._engine.items.layout import INLINE_BYTES, as_array, as_tensor, is_dense
from stream_dataloader._engine.items.structure import flatten, unflatten
from stream_dataloader._engine.memory.pickling import Message

if TYPE_CHECKING:
    from typing_extensions import Self

#: By field: a tensor on a device, and the host tensor that it was copied from. The pair is valid as long as the field
#: holds this very tensor.
Kept = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class KeptFields:
    """Base of `StreamBatch`, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def _of_checked(cls, later: Callable[[str], Mapping[str, Any]], **values: Any) -> Self:
        """Create a batch from values that are known to fit together; `later` makes missing fields on request."""
        batch = object.__new__(cls)
        batch.__dict__.update(values, _later=later)
        return batch

    if not TYPE_CHECKING:  # hidden from type checkers, which would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Make a field at its first access; from then on it is a normal attribute."""
            there = self.__dict__
            if "_later" in there and name in self.__dataclass_fields__ and not name.startswith("_"):
                for made, tensor in there["_later"](name).items():
                    there.setdefault(made, tensor)  # another thread may have made it first
                return there[name]
            hint = f"; {hint}" if (hint := field_hint(name)) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

        def __getitem__(self, key: Any) -> Any:
            """Raise an error that names the field; `x, y = batch` ends here, too, as there is no `__iter__`."""
            kind, data = type(self).__name__, getattr(self, "data", None)
            remedy = "batch.data holds what the streams yielded: x, y = batch.data for streams of pairs"
            if isinstance(key, str):
                is_inside = isinstance(data, Mapping) and key in data
                remedy = f"write batch.data[{key!r}]" if is_inside else field_hint(key) or remedy
            if isinstance(key, str) and key in self.__dataclass_fields__:
                remedy = f"write batch.{key}"
            raise TypeError(f"a {kind} has fields, and no entries; {remedy}")

    def _books_for(self, name: str) -> Bookkeeping | None:
        """Return the bookkeeping that a field will be made from; None if it was made, and may have been changed."""
        later = None if name in self.__dict__ else self.__dict__.get("_later")
        return later if isinstance(later, Bookkeeping) else None

    def __dir__(self) -> list[str]:
        """List all fields, also those that are not made yet."""
        return sorted({*super().__dir__(), *(field.name for field in fields(self))})

    def _bookkeeping(self) -> list[str]:
        """List the fields that are tensors, except the data."""
        names = (field.name for field in fields(self) if field.name != "data")
        return [name for name in names if isinstance(getattr(self, name), torch.Tensor)]

    def _in_host(self, name: str) -> torch.Tensor:
        """Return a field's tensor in host memory, copied only if no host copy was kept."""
        tensor: torch.Tensor = getattr(self, name)
        known, copied_from = self._copied_from().get(name, (None, tensor))
        return copied_from if known is tensor else tensor.cpu()

    def _copied_from(self) -> Kept:
        return self.__dict__.get("_kept") or {}

    def _moved_from(self, batch: Self) -> Self:
        kept = dict(batch._copied_from())
        for name in self._bookkeeping():
            here, there = getattr(batch, name), getattr(self, name)
            if there is here or there.device.type == "cpu":
                continue
            if here.device.type == "cpu":  # cloned, as its slot may be reused for another batch once the data is copied
                kept[name] = there, here.clone()
            elif name in kept and kept[name][0] is here:
                kept[name] = there, kept[name][1]
        if kept:
            self.__dict__["_kept"] = kept
        return self

    def _of_lanes(self, rows: slice) -> Self:
        """Return some lanes, as views."""
        return self._cut(lambda leaf: [t[rows] for t in leaf] if isinstance(leaf, list) else _lanes_of(leaf, rows))

    def _from_step(self, t: int) -> Self:
        """Return the time steps from `t` on, as views."""
        return self._cut(lambda leaf: leaf[t:] if isinstance(leaf, list) or getattr(leaf, "ndim", 0) > 1 else leaf)

    def _cut(self, cut: Callable[[Any], Any]) -> Self:
        """Return a batch of views, given how a leaf or a field is cut."""
        taken = {name: cut(getattr(self, name)) for name in self._bookkeeping()}
        kept = {
            name: (taken[name], cut(copied_from))
            for name, (there, copied_from) in self._copied_from().items()
            if there is getattr(self, name)
        }
        structure, leaves = flatten(getattr(self, "data"))  # noqa: B009 - the subclass has it
        return dataclasses.replace(self, **taken, data=unflatten(structure, map(cut, leaves)), _kept=kept or None)

    def _sealed(self) -> Self:
        """Pickle this batch now and return it as a message, for torch's own `DataLoader`.

        Torch's queue pickles in a background thread, where errors are lost, and late freeing of tensors crashes torch.
        """
        message = Message(self)
        batch = self._of_checked(lambda _: vars(message.read()))
        batch.__dict__["_message"] = message  # not a field, so a copy by `dataclasses.replace` does not inherit it
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        message: Message | None = self.__dict__.get("_message")
        if message is not None:
            return message.__reduce__()
        values = {field.name: map_leaves(getattr(self, field.name), _inlined) for field in fields(self)}
        return functools.partial(type(self), **values), ()


def _lanes_of(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return some lanes of a tensor `(B,)` or `(T, B, ...)`."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
        return tensor
    return tensor[rows] if tensor.ndim == 1 else tensor[:, rows]


class _Inlined:
    """A small tensor that is pickled into the message; torch would open shared memory for it, which costs more."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return as_tensor, (np.ascontiguousarray(as_array(self._tensor)), self._tensor.dtype)


def _inlined(leaf: Any) -> Any:
    dense = type(leaf) is torch.Tensor and leaf.device.type == "cpu" and is_dense(leaf)
    return _Inlined(leaf) if dense and leaf.nbytes <= INLINE_BYTES else leaf


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to each leaf of containers and lists in `value`; a batch keeps its hidden content."""
    if type(value) is list:
        return [map_leaves(element, function) for element in value]
    if isinstance(value, dict) and type(value) is not dict:  # a collate_fn made it, so its type is kept
        elements = {key: map_leaves(element, function) for key, element in value.items()}
        try:
            new = copy.copy(value)
            new.update(elements)
        except Exception:  # the type cannot be copied
            return elements
        return new
    if isinstance(value, KeptFields):
        names = [field.name for field in fields(value)]
        return dataclasses.replace(value, **{name: map_leaves(getattr(value, name), function) for name in names})
    structure, leaves = flatten(value)
    if structure.type is None:
        return function(value)
    return unflatten(structure, iter([map_leaves(leaf, function) for leaf in leaves]))
