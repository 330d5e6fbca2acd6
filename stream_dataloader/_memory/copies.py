"""Where copies of batches to CUDA devices are begun: what lies in host memory may still be read from there.

Guarantee: a device or stream is known here before the first copy to it, or on it, can be let go of.
"""

from __future__ import annotations

from typing import Any

_devices: set[int] = set()
_streams: set[Any] = set()


def note_copy_to(number: int) -> None:
    """Say that batches are copied to a CUDA device, on whatever stream is its current one."""
    _devices.add(number)


def note_copy_on(stream: Any) -> None:
    """Say that batches are copied on a stream, which may not be the current one when they are let go."""
    _streams.add(stream)


def devices_copied_to() -> frozenset[int]:
    """The numbers of all such devices."""
    return frozenset(_devices)


def streams_copied_on() -> frozenset[Any]:
    """All such streams."""
    return frozenset(_streams)
