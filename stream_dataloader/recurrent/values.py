"""Conversion of nested values to plain data that `torch.load(..., weights_only=True)` accepts, and back.

::

    value                                   plain
    tensor, number, text, bytes, None       itself; a tensor is copied
    list, dict                              the same, with plain values
    tuple, set, deque, array                a tuple of a name and the parts: ("deque", 4, [...]), ("array", tensor)
    an object with state_dict               ("state", its state)

Guarantee: a decoded value equals the encoded one, and shares nothing with it. A value that cannot be encoded raises an
error that says where it is.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stream_dataloader.errors import StateError

_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def encode(value: Any, name: str) -> Any:
    """Return a value as plain data that shares nothing with it.

    Args:
        value: The value.
        name: Name of the value in errors.

    Raises:
        StateError: The value holds an object of another type, or a tensor with a gradient.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise StateError(f"{name} has a gradient, which cannot be saved; keep tensor.detach()")
        return value.clone()
    if kind in (dict, OrderedDict):
        if odd := [key for key in value if type(key) not in _SCALARS]:
            raise StateError(f"{name} has a key of type {type(odd[0]).__name__}; use numbers or texts as keys")
        return {key: encode(one, f"{name}[{key!r}]") for key, one in value.items()}
    if kind in (list, tuple, set, deque):
        parts = [encode(one, f"{name}[{i}]") for i, one in enumerate(value)]
        if kind is list:
            return parts
        return (kind.__name__, value.maxlen, parts) if kind is deque else (kind.__name__, parts)
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            held = torch.from_numpy(np.array(value))
        except TypeError as error:
            raise StateError(f"{name} is an array of {value.dtype}, which torch does not have: {error}") from error
        return ("array" if isinstance(value, np.ndarray) else "number", held)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "state", encode(value.state_dict(), f"{name}.state_dict()")
    raise StateError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved; keep tensors, arrays, numbers, "
        "texts and containers of them, or give its class state_dict and load_state_dict"
    )


def decode(plain: Any, new: Callable[[], Any]) -> Any:
    """Return the value that `encode` made plain data from.

    Args:
        plain: The plain data.
        new: Function that makes an object to load the state of an object into.

    Raises:
        StateError: The data are not from `encode`.
    """
    if isinstance(plain, torch.Tensor):
        return plain.clone()
    if isinstance(plain, dict):
        return {key: decode(one, new) for key, one in plain.items()}
    if isinstance(plain, list):
        return [decode(one, new) for one in plain]
    if not isinstance(plain, tuple):
        return plain
    match plain:
        case ("tuple", list(parts)):
            return tuple([decode(one, new) for one in parts])
        case ("set", list(parts)):
            return {decode(one, new) for one in parts}
        case ("deque", maxlen, list(parts)):
            return deque([decode(one, new) for one in parts], maxlen)
        case ("array", torch.Tensor() as held):
            return held.clone().numpy()
        case ("number", torch.Tensor() as held):
            return held.numpy()[()]
        case ("state", state):
            value = new()
            if not hasattr(value, "load_state_dict"):
                kind = type(value).__name__
                raise StateError(
                    f"the state is from an object, but new() makes a {kind}; pass new= as when it was saved"
                )
            value.load_state_dict(decode(state, new))
            return value
    raise StateError(f"a value in the state cannot be read: {plain[:1]!r}; it was changed since")


def move(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors on a device. Objects with a method `to` move themselves."""
    if isinstance(value, dict):
        moved = copy.copy(value)  # keeps the dict's own class, which may have a default
        moved.update({key: move(one, device) for key, one in value.items()})
        return moved
    if type(value) in (list, tuple):
        return type(value)(move(one, device) for one in value)
    if isinstance(value, deque):
        return deque((move(one, device) for one in value), value.maxlen)
    if not hasattr(value, "to"):
        return value
    moved = value.to(device)
    return value if moved is None else moved
