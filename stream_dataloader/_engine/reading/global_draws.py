"""The global generators of `random`, numpy and torch, seeded for each stream and kept apart between streams.

::

    lane 0   window of stream a |                     | next window of a
    lane 1                      | window of stream b  |
    state    a's                | b's                 | a's, from where it stopped; outside of streams: the program's

Guarantee: a stream's draws depend on (seed, epoch, source) and on its own earlier draws, not on the lanes and workers
around it. The program's own generators go on as if no stream had drawn.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.random import SeedSequence

from stream_dataloader.stream_info import StreamInfo

_State: TypeAlias = tuple[Any, Any, torch.Tensor]


def seed_generators(sequence: SeedSequence) -> None:
    """Seed the global generators; of torch only the CPU's, as `torch.manual_seed` formats a stack for each device."""
    one, two, three = sequence.spawn(3)
    random.seed(int.from_bytes(one.generate_state(4).tobytes(), "little"))
    np.random.seed(two.generate_state(4))  # noqa: NPY002  the global one
    torch.default_generator.manual_seed(int(three.generate_state(1, np.uint64)[0]) >> 1)


class GlobalDraws:
    """One stream's own state of the global generators. Only one thread of a process may use them."""

    def __init__(self, info: StreamInfo) -> None:
        self._info = info
        self._own: _State | None = None  # None: it was not opened yet

    def seed(self) -> None:
        """Seed the generators for the stream; called after `enter`, whenever it is opened, also in its middle."""
        seed_generators(self._info.global_seed)

    def enter(self) -> None:
        """Switch the generators to the stream, until another stream enters or `give_back` is called."""
        global _inside, _programs
        if _inside is self:  # saving and loading the states takes a quarter of a millisecond
            return
        if _inside is None:
            _programs = _states()
        else:
            _inside._own = _states()
        _inside = self
        if self._own is not None:
            _restore(self._own)


def give_back() -> None:
    """Switch the generators back to the program."""
    global _inside
    if _inside is not None:
        _inside._own, _inside = _states(), None
        _restore(_programs)


_inside: GlobalDraws | None = None  # the stream that the generators belong to now; None: the program
_programs: _State  # the program's generators when a stream entered


def _states() -> _State:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002


def _restore(states: _State) -> None:
    own, of_numpy, of_torch = states
    random.setstate(own)
    np.random.set_state(of_numpy)  # noqa: NPY002
    torch.default_generator.set_state(of_torch)
