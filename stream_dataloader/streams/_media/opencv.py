"""OpenCV, for what cannot do without it; everything else runs where it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

__all__ = ["check_opencv", "import_opencv"]

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
