"""Seeds of the global generators in workers.

Torch draws a base seed when it starts workers, and seeds worker w with base + w. Workers that are kept are seeded the
same way at each epoch, so that they draw the same numbers as newly started ones.

OpenCV has a generator for each thread, which every thread and process begins in the same state. A stream may be the
first to import OpenCV, and draw at once, so a worker process seeds it as soon as it is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch


def base_seed(seed: int) -> int:
    """Return the base seed that torch draws from a generator with this seed."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def seed_worker(seed: int) -> None:
    """Seed this process's generators; of torch only the CPU's, whose seed `torch.initial_seed()` then returns."""
    random.seed(seed)
    np.random.seed(np.random.SeedSequence(seed).generate_state(4))  # noqa: NPY002  the global one
    torch.default_generator.manual_seed(seed)
    _AtImport.seed = seed
    seed_opencv(seed)
    if "cv2" not in sys.modules and _AtImport not in sys.meta_path:
        sys.meta_path.insert(0, _AtImport)


def seed_opencv(seed: int) -> None:
    """Seed OpenCV's generator of this thread, if OpenCV was imported."""
    if (opencv := sys.modules.get("cv2")) is not None:
        own = int(np.random.SeedSequence(seed).generate_state(5)[4])  # the words before it are numpy's
        opencv.setRNGSeed(own >> 1)  # takes a C int


class _AtImport:
    """Finder on `sys.meta_path` that seeds OpenCV when it is imported."""

    seed = 0
    _is_asking = False

    @classmethod
    def find_spec(cls, name: str, *_: Any) -> ModuleSpec | None:
        if name != "cv2" or cls._is_asking:
            return None
        # It stays, as libraries look for OpenCV without importing it, and OpenCV finds its binary by its own name.
        cls._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            cls._is_asking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                seed_opencv(cls.seed)

            with contextlib.suppress(AttributeError):  # an unusual loader without room for it: import unseeded
                loader.exec_module = exec_module
        return spec
