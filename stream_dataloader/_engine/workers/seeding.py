"""Seeds of the global generators in worker processes.

Torch draws a base seed when it starts workers, and seeds worker w with base + w. Workers that are kept are seeded the
same way at each epoch, so that they draw the same numbers as newly started ones.
"""

from __future__ import annotations

import random

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
