"""What tells one list of sources from another.

Guarantee: equal lists have the same fingerprint in every process, on every machine and Python version.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from stream_dataloader._items.layout import as_array
from stream_dataloader._reading.sources import MadeSources

_LOOKED_AT = 1024


def fingerprint_of(sources: Sequence[Any]) -> str:
    """A hash of a list of sources that does not depend on process, machine or Python version.

    Of sources that a sequence makes, of which there may be any number, it takes the number and some in even steps. If
    the sequence has a `fingerprint`, a string, it takes that instead of any source.
    Plain values, containers of them, paths, arrays, tensors and dataclasses count by content, other objects by
    their pickles, which may differ between versions.
    """
    digest = hashlib.blake2b(digest_size=16)
    looked_at = sources
    own = getattr(sources.sequence, "fingerprint", None) if isinstance(sources, MadeSources) else None
    if isinstance(own, str):
        looked_at = [len(sources), own]
    elif isinstance(sources, MadeSources) and len(sources) > _LOOKED_AT:
        looked_at = [len(sources), *(sources[i * len(sources) // _LOOKED_AT] for i in range(_LOOKED_AT)), sources[-1]]
    for source in looked_at:
        _hash(source, digest.update)
    return digest.hexdigest()


def _hash(value: Any, update: Any) -> None:
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex, PurePath)):
        text = repr(value.as_posix() if isinstance(value, PurePath) else value)
        update(f"{text}\0".encode("utf-8", "backslashreplace"))
    elif isinstance(value, Mapping):
        update(b"{")
        for key in sorted(value, key=repr):
            _hash(key, update)
            _hash(value[key], update)
        update(b"}")
    elif isinstance(value, (list, tuple)):
        update(b"[")
        for element in value:
            _hash(element, update)
        update(b"]")
    elif is_dataclass(value) and not isinstance(value, type):
        update(type(value).__qualname__.encode())
        for field in fields(value):
            _hash(getattr(value, field.name), update)
    elif isinstance(value, torch.Tensor):
        update(f"{value.dtype}".encode())
        _hash(as_array(value), update)
    elif isinstance(value, (np.ndarray, np.generic)) and not np.asarray(value).dtype.hasobject:
        update(f"{value.dtype.str}{value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())
    else:
        try:
            update(pickle.dumps(pickle.loads(pickle.dumps(value, 5)), 5))  # read back: what is shared becomes equal
        except Exception:  # cloudpickle may do, with its own notion of equality
            update(type(value).__qualname__.encode())
