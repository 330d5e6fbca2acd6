"""Tables that took long to work out, kept in this library's cache as numpy's own files.

Guarantee: a damaged file is as if it were not there; a cache that cannot be written to is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.streams.cache.file_cache import cache_directory

__all__ = ["keep", "load"]


def _file(folder: str, name: str) -> str:
    key = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return os.path.join(cache_directory(folder), f"{key}.npz")


def keep(folder: str, name: str, tables: Mapping[str, Any]) -> None:
    """Keep arrays of numbers in a folder of the cache."""
    file = _file(folder, name)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(file), suffix=".tmp", delete=False) as unfinished:
            try:
                np.savez(unfinished, **tables)
                unfinished.flush()
                os.replace(unfinished.name, file)
            except OSError:
                os.unlink(unfinished.name)


def load(folder: str, name: str) -> dict[str, NDArray[Any]] | None:
    """What was kept; None if nothing was, or it is damaged."""
    try:
        with open(_file(folder, name), "rb") as file, np.load(file, allow_pickle=False) as tables:
            return dict(tables)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
