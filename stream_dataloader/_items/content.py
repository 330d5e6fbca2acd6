"""What tells one value from another, in bytes.

Guarantee: equal values give the same bytes in every process, on every machine and Python version.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from stream_dataloader._items.layout import as_array


def hash_content(value: Any, update: Callable[[bytes], Any]) -> None:
    """Hand the bytes that stand for a value to a hash function's `update`.

    Objects that are neither plain nor arrays count by their pickles, which may differ between versions.
    """
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex, PurePath)):
        text = repr(value.as_posix() if isinstance(value, PurePath) else value)
        update(f"{text}\0".encode("utf-8", "backslashreplace"))
    elif isinstance(value, Mapping):
        update(b"{")
        for key in sorted(value, key=repr):
            hash_content(key, update)
            hash_content(value[key], update)
        update(b"}")
    elif isinstance(value, (list, tuple)):
        update(b"[")
        for element in value:
            hash_content(element, update)
        update(b"]")
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
    else:
        try:
            update(pickle.dumps(pickle.loads(pickle.dumps(value, 5)), 5))  # what is shared becomes equal
        except Exception:  # cloudpickle may do, with its own notion of equality
            update(type(value).__qualname__.encode())
