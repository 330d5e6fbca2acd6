"""What a loader reads now: one iteration after the other, or one that is read in epochs of n batches.

::

    epochs of their own     iteration 0 |iteration 1 |iteration 2       each begins where its epoch does
    n batches, kept         iteration 0 ----|-----------|--------       workers, and what they have read ahead, stay
    n batches, not kept     iteration 0 |iteration 1 |iteration 2       each is resumed where the one before stopped

Guarantee: one iterator at a time is read; the one before raises once the next has begun.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from stream_dataloader._device import OneAhead
from stream_dataloader._loader.members import AnyPosition
from stream_dataloader._memory.endings import Ending
from stream_dataloader._workers.iteration import Iteration, Output
from stream_dataloader._workers.starter import Starter
from stream_dataloader._workers.stretch import Stretch
from stream_dataloader.protocols import CollateFn


class Kind(NamedTuple):
    """What an iterator yields.

    Attributes:
        collate_fn: Makes it of the lanes' windows; None yields `StreamBatch`es.
        parts: Each worker's parts.
        device: Where it is moved to.
    """

    collate_fn: CollateFn | None
    parts: bool
    device: torch.device | None


class _Kept(NamedTuple):
    """A reading of a run that outlives its epochs.

    Attributes:
        iteration: What is read.
        batches: It, on the device, with what was copied ahead.
        kind: What it yields.
    """

    iteration: Iteration
    batches: Iterator[Any]
    kind: Kind


class Running:
    """What a loader reads now.

    Args:
        starter: Starts to read.
        position: Where the loader stands.
        output: How what is yielded is made, but for a `collate_fn`.
        keep: Whether what is read in epochs of n batches stays between them.
    """

    def __init__(self, starter: Starter, position: AnyPosition, output: Output, *, keep: bool) -> None:
        self._starter = starter
        self._position = position
        self._output = output
        self._keep = keep
        self._newest: weakref.ref[Iteration] | None = None
        self._ending: Ending | None = None  # of the newest, which may be gone
        self._stretch: weakref.ref[Stretch] | None = None
        self._kept: _Kept | None = None

    @property
    def epoch(self) -> int | None:
        """Number of the epoch that is being read; None if none is."""
        iteration = None if self._newest is None else self._newest()
        if iteration is None or iteration.stale or (iteration.closed and not self._position.end_is_ahead):
            return None
        if self._position.left is not None and not self._is_in_stretch:
            return None
        return self._position.number

    @property
    def _is_in_stretch(self) -> bool:
        stretch = None if self._stretch is None else self._stretch()
        return stretch is not None and stretch.is_open

    def begin(self, kind: Kind) -> Iterator[Any]:
        """Begin to read what comes next, and return the iterator over it."""
        kept = self._kept
        if kept is not None and self._goes_on(kept, kind):
            self._position.go_on()
            self._starter.go_on()
            iteration, batches = kept.iteration, kept.batches
            if kind.parts:
                batches = self._delivered(iteration, kind)
        else:
            self.end()
            iteration = self._starter.start(
                self._position, self._output._replace(collate_fn=kind.collate_fn), parts=kind.parts
            )
            self._newest, self._ending = weakref.ref(iteration), iteration.ending
            batches = self._delivered(iteration, kind)
        length = self._position.left
        if length is None:
            return batches
        if self._keep:
            self._kept = _Kept(iteration, batches, kind)
        self._outdate_stretch()
        stretch = Stretch(batches, None if kind.parts else length, None if self._keep else iteration)
        self._stretch = weakref.ref(stretch)
        return stretch

    def _goes_on(self, kept: _Kept, kind: Kind) -> bool:
        """Whether the run that was kept can be read on, as it is, for an iterator that yields something."""
        if not kept.iteration.is_own or kept.iteration.closed or kept.kind != kind or not self._position.goes_on:
            return False
        if kind.parts and self._position.is_ahead:  # a part was copied ahead, and is lost
            return False
        return not self._starter.lost_workers()

    def _delivered(self, iteration: Iteration, kind: Kind) -> Iterator[Any]:
        """What an iteration yields, on the device."""
        batches = iteration.parts(self._position.left) if kind.parts else iteration
        if kind.device is None or kind.device.type != "cuda":
            return batches
        assert self._position.progress is not None
        memory = self._starter.pool.memory
        memory.lock_for(kind.device)
        return OneAhead(batches, kind.device, self._position.progress.hold, memory.release)  # that one copies by itself

    def end(self) -> None:
        """End what is being read: its iterator raises from now on."""
        self._kept = None
        if self._newest is not None and (iteration := self._newest()) is not None:
            iteration.close()
            iteration.stale = True
        elif self._ending is not None:
            self._ending.now()
        self._outdate_stretch()

    def _outdate_stretch(self) -> None:
        if self._stretch is not None and (stretch := self._stretch()) is not None:
            stretch.stale = True

    def renew(self) -> None:
        """Keep nothing; an iterator that is being read goes on."""
        self._kept = None
