"""Pickling of a `numpy.memmap`, or a view of one, as a place in its file; pickle would copy its content.

Guarantee: unpickling maps the bytes of the same file, or raises an error. An array without such a file is copied.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from stream_dataloader._engine.descriptors import above_standard

__all__ = ["reduce_map"]


def reduce_map(array: np.memmap[Any, Any]) -> Any:
    """Reduce a map to its path, its mode, and its place in the file."""
    file: Any = getattr(array, "_mmap", None)
    if file is None or not array.size or array.filename is None or array.mode == "c" or array.dtype.hasobject:
        return array.__reduce_ex__(5)
    try:
        identity = _identity(path := os.fspath(array.filename))
    except FileNotFoundError:
        return array.__reduce_ex__(5)
    strides = [step * (count - 1) for step, count in zip(array.strides, array.shape, strict=True)]
    before = -sum(step for step in strides if step < 0)
    size = before + sum(step for step in strides if step > 0) + array.itemsize
    # A view has the offset of the map that it was made from. The map itself begins at the page of that offset.
    page = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = page + array.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data - before
    mode = "r" if array.mode == "r" or not array.flags.writeable else "r+"  # "w+" would erase the file
    view = array.shape, array.dtype, before, array.strides
    return _mapped, (path, identity, mode, offset, size, view)


def _mapped(path: str, identity: tuple[int, int], mode: Any, offset: int, size: int, view: tuple[Any, ...]) -> Any:
    if _identity(path) != identity:
        raise OSError(f"{path}, which a source is mapped from, is another file now; map it again")
    with above_standard():
        file = np.memmap(path, np.uint8, mode, offset, (size,))
    shape, dtype, before, strides = view
    array: Any = np.ndarray.__new__(np.memmap, shape, dtype, file, before, strides)
    for name in ("_mmap", "filename", "mode", "offset"):
        setattr(array, name, getattr(file, name))
    return array


def _identity(path: str) -> tuple[int, int]:
    known = os.stat(path)
    return known.st_dev, known.st_ino
