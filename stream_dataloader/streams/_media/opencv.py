"""OpenCV, for what cannot do without it; everything else runs where it is not installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["check_opencv", "import_opencv", "pack_planes"]

_REMEDY = (
    "pip install opencv-python, or opencv-python-headless on a machine without a display "
    "(neither has wheels for free-threaded Pythons)"
)


def check_opencv(user: str) -> None:
    """Raise if OpenCV is not installed, without importing it; `user` names what needs it."""
    if importlib.util.find_spec("cv2") is None:
        raise ImportError(f"{user} needs OpenCV, which is not installed: {_REMEDY}")


def import_opencv(user: str) -> ModuleType:
    """OpenCV's module `cv2`; an ImportError if it is not installed, or lacks a library."""
    check_opencv(user)
    try:
        return importlib.import_module("cv2")
    except ImportError as error:
        raise ImportError(f"{user} needs OpenCV, which cannot be imported ({error}): {_REMEDY}") from error


def pack_planes(planes: list[Any], into: Any | None) -> Any:
    """Planes `(H, W)` as pixels `(H, W, C)`: by OpenCV if installed, which is faster; `into` is used if it fits."""
    return _packer()(planes, into)


@functools.cache
def _packer() -> Callable[[list[Any], Any | None], Any]:
    try:
        merge: Callable[[list[Any], Any | None], Any] = import_opencv("").merge
    except ImportError:
        return _packed
    return merge


def _packed(planes: list[Any], into: Any | None) -> Any:
    shape = (*planes[0].shape, len(planes))
    out = into if into is not None and into.shape == shape else np.empty(shape, planes[0].dtype)
    for channel, plane in enumerate(planes):
        out[..., channel] = plane
    return out
