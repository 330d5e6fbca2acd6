"""Streams that workers of any kind are tested with: items of all kinds, what breaks; and workers that are killed."""

import importlib.util
import os
import signal
import sys
import time

import numpy as np
import torch
from helpers import FOREVER

from stream_dataloader import get_stream_info

#: Makes item i of source n.
ITEMS = {
    "structure": lambda n, i: {"a": np.full((2, 3), n + i), "b": (float(i), True)},
    "object": lambda n, i: {"name": f"{n}-{i}", "a": np.int16(i)},
    "draws": lambda n, i: (get_stream_info().rng.integers(1 << 30), get_stream_info().rng_at(i).integers(1 << 30)),
    "tensor": lambda n, i: torch.full((3,), n + i, dtype=torch.bfloat16),
}


class Broken(Exception):
    pass


def acting(acts, items=9):
    """A factory of streams of items `100 * source + position`.

    Before it yields the item it does what `acts[source, position]` is; `acts[source, None]` where it is opened.
    """

    def read(n):
        for i in range(items):
            acts.get((n, i), int)()
            yield 100 * n + i

    def open_stream(n):
        acts.get((n, None), int)()
        return read(n)

    return open_stream


def raising(error, *told):
    def act():
        raise error(*told)

    return act


def few(path, act, most=1):
    """Does something the first time, or the first few times, that any process calls this: it counts in a file."""

    def first():
        count = path.stat().st_size if path.exists() else 0
        if count < most:
            path.write_bytes(bytes(count + 1))
            act()

    return first


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(FOREVER)


def waiting(path):
    """Waits until there is a file."""

    def act():
        while not path.exists():
            time.sleep(0.005)

    return act


imported_opencv = False


def first_to_draw_of_opencv(length):
    """Six draws an item, of an OpenCV that only this imports, although it was looked for before."""
    global imported_opencv
    if not imported_opencv:
        assert "cv2" not in sys.modules
        assert importlib.util.find_spec("cv2")
    import cv2

    imported_opencv = True

    for _ in range(length):
        yield cv2.randu(np.zeros((1, 6)), 0, 1)[0]


def odd(n):
    """A stream of which source 2 has an item that is not like the others."""
    for i in range(9):
        yield np.zeros(2 + (n == 2 and i == 5))


class Writing:
    """Counts up by dicts, or writes them, at most two time steps a call; raises once where it is broken."""

    def __init__(self, length, dtype=torch.int32, broken=None, answer=None, may_be_iterated=False):
        self.length, self.dtype, self.broken, self.answer = length, dtype, broken, answer
        self.position, self.most = 0, length if may_be_iterated else 1

    def __iter__(self):
        for position in range(self.length):
            assert position < self.most, "iterated"
            self.position += 1
            yield {"x": torch.full((3,), position).to(self.dtype), "y": position}

    def read_into(self, out):
        if self.position == self.broken:
            self.broken = None
            raise OSError("unplugged")
        if self.answer is not None:
            return self.answer
        assert set(out) == {"x", "y"}
        assert type(out["x"]) is (torch.Tensor if self.dtype == torch.bfloat16 else np.ndarray)
        count = min(2, len(out["x"]), self.length - self.position)
        for i in range(count):
            out["x"][i] = out["y"][i] = self.position + i
        self.position += count
        return count
