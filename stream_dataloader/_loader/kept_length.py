"""`KeptLength`: warns once when Lightning is about to cut an epoch by the length of another.

Lightning asks a loader for its length when it sets up its data, keeps it for all epochs, and asks again at each `iter`,
but only to take the smaller one. Where lengths of epochs differ, a longer epoch is cut, and a shorter one is not
validated. A loader cannot see that in what is asked, as whoever calls `len` each epoch asks for the same. So it looks
at who asks: at the names of two modules, once an epoch.

Guarantee: nothing is said unless Lightning keeps a length and reads an epoch of another one.
"""

from __future__ import annotations

import sys
import warnings

_KEEPING = ("lightning.loops.fit_loop", "lightning.loops.evaluation_loop")
_LIMITING = "lightning.utilities.combined_loader"


class KeptLength:
    """The length that Lightning keeps of a loader."""

    def __init__(self) -> None:
        self._kept: int | None = None
        self._warned = False

    def renewed(self) -> None:
        """Lightning will know the length of the coming epoch."""
        self._kept = None

    def asked(self, epoch: int, count: int) -> None:
        """A loader's `__len__` was called, which answers `count` for an epoch."""
        if "lightning" not in sys.modules and "pytorch_lightning" not in sys.modules:
            return
        asking = _module(3)
        if asking in _KEEPING:
            self._kept = count
        elif self._kept not in (None, count) and not self._warned and _module(4) == _LIMITING:
            self._warned = True
            warnings.warn(
                f"Lightning keeps the length of the epoch that it asked for first, {self._kept} batches, and epoch "
                f"{epoch} has {count}. It cuts longer epochs, and does not validate after shorter ones. Add "
                "stream_dataloader.integrations.lightning.StreamEpochs() to the trainer's callbacks",
                RuntimeWarning,
                stacklevel=3,
            )


def _module(depth: int) -> str:
    """The module of a caller, under the name that Lightning's two packages have in common."""
    try:
        name: str = sys._getframe(depth).f_globals.get("__name__", "")
    except ValueError:  # there are not so many
        return ""
    return name.replace("pytorch_lightning.", "lightning.").replace("lightning.pytorch.", "lightning.")
