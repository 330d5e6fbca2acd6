"""Streams that workers of any kind are tested with: items of all kinds, and what breaks."""

import numpy as np
import torch

#: Makes item i of source n.
ITEMS = {
    "structure": lambda n, i: {"a": np.full((2, 3), n + i), "b": (float(i), True)},
    "object": lambda n, i: {"name": f"{n}-{i}", "a": np.int16(i)},
    "tensor": lambda n, i: torch.full((3,), n + i, dtype=torch.bfloat16),
}


class Broken(Exception):
    pass


def failing(at, error, *told):
    """A factory of streams of which one fails: at source n, item i."""

    def read(n):
        for i in range(9):
            if (n, i) == at:
                raise error(*told)
            yield i

    return read


def odd(n):
    """A stream of which source 2 has an item that is not like the others."""
    for i in range(9):
        yield np.zeros(2 + (n == 2 and i == 5))
