"""Seeds of the global generators in workers.

Torch draws a base seed when it starts workers, and seeds worker w with base + w. Workers that are kept are seeded the
same way at each epoch, so that they draw the same numbers as newly started ones.

OpenCV has a generator for each thread, which every thread and process begins in the same state.
"""

from __future__ import annotations

import random
import sys

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
    seed_opencv(seed)


def seed_opencv(seed: int) -> None:
    """Seed OpenCV's generator of this thread, if OpenCV was imported."""
    if (opencv := sys.modules.get("cv2")) is not None:
        own = int(np.random.SeedSequence(seed).generate_state(5)[4])  # the words before it are numpy's
        opencv.setRNGSeed(own >> 1)  # takes a C int
