"""Whether the disk will do: what the rest of the streams takes, judged by those that are packed.

Guarantee: a disk that is too small for streams of known lengths is an error before it is full; of others, a warning
tells.
"""

from __future__ import annotations

import errno
import os
import time
import warnings

from stream_dataloader.stores._packing.folder import PartialFolder
from stream_dataloader.stores._packing.report import size_text

__all__ = ["SpaceWatch", "disk_bytes"]

LOOKED_SECONDS = 2.0


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


class SpaceWatch:
    """Looks at the disk now and then while streams are packed.

    Args:
        folder: Where they are packed.
        streams: How many there are to pack.
        steps: Their time steps; None if their number is not known.

    Attributes:
        packed: How many streams were packed since.
        steps_read: How many time steps were read for it.
    """

    def __init__(self, folder: PartialFolder, streams: int, steps: int | None) -> None:
        self._folder = folder
        self._streams = streams
        self._steps = steps
        self._used_before = disk_bytes(folder.store)
        self._looked = 0.0
        self._has_warned = False
        self.packed = 0
        self.steps_read = 0

    def look(self) -> None:
        """Warn if the disk seems too small.

        Raises:
            OSError: It is too small, as lengths that are known tell.
        """
        if time.monotonic() - self._looked < LOOKED_SECONDS:
            return
        self._looked = time.monotonic()
        used = disk_bytes(self._folder.store) - self._used_before
        done, left = self.packed, self._streams - self.packed
        if self._steps is not None:
            done, left = self.steps_read, self._steps - self.steps_read
        if not done or used * left // done <= (free := self._folder.free_bytes()):
            return
        text = (
            f"the streams that are left take about {size_text(used * left // done)}, and the disk of "
            f"{self._folder.partial} has {size_text(free)} free"
        )
        if self._steps is not None:
            raise OSError(errno.ENOSPC, text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{text}; free some of it while it goes on", RuntimeWarning, stacklevel=2)
