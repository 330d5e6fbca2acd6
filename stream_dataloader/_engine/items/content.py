"""Hashing of values by their content.

Guarantee: equal values give the same bytes in every process, on every machine and Python version, as long as pickle
keeps the same content of their objects there.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.items.layout import as_array
from stream_dataloader.errors import shorten

_PLAIN = (str, bytes, bool, int, float, complex)


def hash_content(value: Any, update: Callable[[bytes], Any]) -> None:
    """Pass the bytes that represent a value to a hash function's `update`.

    Objects that are neither plain, arrays nor dataclasses are hashed by the content that pickle would keep of them.
    Their pickles themselves would not do: Python orders a set differently in each process, and a pickle differs between
    one string that is used twice and two equal strings.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        plain = value.item()
        value = value if isinstance(plain, np.generic) else plain  # Python has no number type for a `longdouble`
    if value is None or isinstance(value, (*_PLAIN, PurePath)):
        update(f"{_text(value)}\0".encode("utf-8", "backslashreplace"))
    elif isinstance(value, Mapping):
        update(b"{")
        keys = list(value)
        texts = all(type(key) in (str, _OtherHash) for key in keys)
        in_order = sorted(keys, key=repr) if texts else sorted(keys, key=_digest)
        for key in in_order:
            hash_content(key, update)
            hash_content(value[key], update)
        update(b"}")
    elif isinstance(value, Set):
        update(b"<")
        for digest in sorted(map(_digest, value)):
            update(digest)
        update(b">")
    elif isinstance(value, (list, tuple)):
        _hash_all(value, update)
    elif is_dataclass(value) and not isinstance(value, type):
        update(type(value).__qualname__.encode())
        for field in fields(value):
            hash_content(getattr(value, field.name), update)
    elif isinstance(value, torch.Tensor):
        update(f"{value.dtype}".encode())
        hash_content(as_array(value), update)
    elif isinstance(value, (np.ndarray, np.generic)) and not np.asarray(value).dtype.hasobject:
        update(f"{value.dtype.str}{value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, np.ndarray):
        update(f"{value.shape}".encode())
        _hash_all(value.ravel().tolist(), update)
    else:
        _hash_object(value, update)


def _text(value: Any) -> str:
    """Return the text of a plain value, the same for a subclass, such as numpy's strings or members of an `IntEnum`."""
    if isinstance(value, PurePath):
        return repr(value.as_posix())
    if value is None:
        return "None"
    kind: Any = next(kind for kind in (bool, *_PLAIN) if isinstance(value, kind))
    text: str = kind.__repr__(value)
    return text


def _hash_all(values: Iterable[Any], update: Callable[[bytes], Any]) -> None:
    update(b"[")
    for element in values:
        hash_content(element, update)
    update(b"]")


class _Inside(threading.local):
    """Objects that are being taken apart in this thread, by id, as they may refer to each other."""

    def __init__(self) -> None:
        self.ids: set[int] = set()


_inside = _Inside()


def _hash_object(value: Any, update: Callable[[bytes], Any]) -> None:
    """Hash an object by its parts as pickle takes them: the function that builds it, its arguments, and its state."""
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        update(f"{value.__qualname__}\0".encode())
        return
    if id(value) in _inside.ids:
        update(b"^")
        return
    try:
        parts = _parts_of(value)
    except Exception:  # cloudpickle may still be able to pickle it, so count the type alone
        parts = type(value).__qualname__
    if isinstance(parts, str):  # pickle keeps only a name
        update(f"{parts}\0".encode())
        return
    changes = [] if not _pickles_itself(value) else [_reordered, _rehashed] if _asks_for_hash(value) else [_reordered]
    others = [other for change in changes if (other := _parts_of_twin(value, change)) is not None]
    if others and len({_digest_within(value, found) for found in (parts, *others)}) > 1:
        raise ValueError(
            f"{shorten(value, 80)} (a {type(value).__qualname__}) does not always pickle to the same content: "
            "this depends on the order of a set, on the hash of a text, on an address or on a random number, so it has "
            "no fingerprint that is the same in other processes; sort sets where it is pickled, use hashlib, or give "
            "the dataset a fingerprint="
        )
    _hash_parts(value, parts, update)


class _Backwards(set):  # type: ignore[type-arg]
    """A set that iterates in another order than the one it was made of, as it may do in another process."""

    def __init__(self, elements: Iterable[Any]) -> None:
        super().__init__(elements)
        # The order of what was given: a copy has one of its own, which could be that order backwards.
        self._order = [*elements][::-1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order)


class _FrozenBackwards(frozenset):  # type: ignore[type-arg]
    """A frozenset that iterates in another order, see `_Backwards`."""

    def __init__(self, elements: Iterable[Any]) -> None:
        self._order = [*elements][::-1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order)


class _OtherHash(str):
    """A text with another hash, as it has in another process."""

    __slots__ = ()
    __eq__ = str.__eq__

    def __hash__(self) -> int:
        return ~str.__hash__(self)


def _reordered(value: Any) -> Any:
    """Return a value whose sets have another order."""
    if type(value) in (set, frozenset):
        return (_Backwards if type(value) is set else _FrozenBackwards)(value)
    return _within(value, _reordered)


def _rehashed(value: Any) -> Any:
    """Return a value whose texts have another hash; those in sets and the keys of dicts must be found, so not these."""
    return _OtherHash(value) if type(value) is str else _within(value, _rehashed)


def _within(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if type(value) is dict:
        return {key: change(element) for key, element in value.items()}
    return value


def _pickles_itself(value: Any) -> bool:
    """Return whether an object has pickling methods written in Python.

    Without these Python keeps an object's attributes, whose sets are hashed regardless of their order.
    """
    own = (getattr(type(value), name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__"))
    return any(isinstance(method, FunctionType) for method in own)


def _asks_for_hash(value: Any) -> bool:
    """Return whether an object calls `hash` when it is pickled; if not, texts must be found where it looks for them."""
    found: list[Any] = []
    before = sys.getprofile()
    sys.setprofile(lambda _, event, function: found.append(event) if event == "c_call" and function is hash else None)
    try:
        value.__reduce_ex__(4)
    finally:
        sys.setprofile(before)
    return bool(found)


def _parts_of_twin(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the parts that pickle would keep of an equal object in another process; None if not known.

    Args:
        change: Returns an attribute's value as it may be in another process.
    """
    kind = type(value)
    try:
        twin = object.__new__(kind)
        slots = [name for base in kind.__mro__ for name in _names(base.__dict__.get("__slots__", ()))]
        for name in {*getattr(value, "__dict__", ()), *slots} - {"__dict__", "__weakref__"}:
            if hasattr(value, name):
                object.__setattr__(twin, name, change(getattr(value, name)))
        parts = _parts_of(twin)
    except Exception:  # the object cannot be made without its constructor, or looks up an attribute's value
        return None
    return None if isinstance(parts, str) else parts


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _digest_within(value: Any, parts: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    _hash_parts(value, parts, found.update)
    return found.digest()


def _parts_of(value: Any) -> Any:
    """Return an object's parts as pickle takes them, with lists in place of iterators; or a name."""
    parts = value.__reduce_ex__(4)
    if isinstance(parts, str):
        return parts
    build, arguments, state, elements, entries = (*parts, None, None, None)[:5]
    return build, arguments, state, list(elements or ()), dict(entries or ())


def _hash_parts(value: Any, parts: Any, update: Callable[[bytes], Any]) -> None:
    _inside.ids.add(id(value))
    try:
        for part in parts:
            hash_content(part, update)
    finally:
        _inside.ids.discard(id(value))


def _digest(value: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    hash_content(value, found.update)
    return found.digest()
