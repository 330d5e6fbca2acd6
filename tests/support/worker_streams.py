"""Streams that workers of any kind are tested with: items of all kinds, what breaks; and workers that are killed."""

import multiprocessing
import os
import random
import signal
import threading

import numpy as np
import torch
from cases import key

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


def kill_one(number=signal.SIGKILL):
    """Send a signal to any of the workers there are."""
    if found := [child.pid for child in multiprocessing.active_children()]:
        os.kill(random.choice(found), number)


def keys_with_a_kill(loader, seconds):
    """The keys of an epoch's batches, in which a worker is killed after so many seconds."""
    timer = threading.Timer(seconds, kill_one)
    timer.start()
    found = [key(batch) for batch in loader]
    timer.join()
    return found
