"""Whether the disk will do: what the rest of the streams takes, judged by those that are packed."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Estimate", "disk_bytes", "estimate"]


class Estimate(NamedTuple):
    """What the rest takes.

    Attributes:
        bytes: On the disk.
        sure: It follows from lengths that are known, not from how long other streams were.
    """

    bytes: int
    sure: bool


def estimate(used: int, steps: int, steps_left: int | None, streams: int, streams_left: int) -> Estimate | None:
    """What the rest takes on the disk; None if nothing tells.

    Args:
        used: What was written so far.
        steps: Time steps that were read for it, of streams that are not finished too.
        steps_left: Time steps of the rest; None if their number is not known.
        streams: How many streams were packed.
        streams_left: How many are left.
    """
    if steps_left is not None and steps and used:
        return Estimate(used * steps_left // steps, sure=True)
    if streams and used:
        return Estimate(used * streams_left // streams, sure=False)
    return None


def disk_bytes(folder: str) -> int:
    """What the files in a folder take on the disk; files that vanish meanwhile count nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += 512 * os.stat(os.path.join(place, name)).st_blocks
            except FileNotFoundError:
                continue
    return total
