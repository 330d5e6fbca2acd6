"""Whether pictures seem to be read as windows, because `time_steps` was forgotten.

Without `time_steps` a picture `(3, H, W)` is read as 3 time steps of `(H, W)`, and one that is `(H, W, 3)` as H steps.
No sign is certain. This one is narrow: every leaf with a time axis has just the two further axes of a picture, and
every lane of the first batch as many steps as a picture has channels. If those come last, items must be uint8, too.

Guarantee: it depends on a loader's first batch alone, so on no number of workers.
"""

from __future__ import annotations

import warnings

import torch

from stream_dataloader._items.layout import Layout, Spec
from stream_dataloader.batch import StreamBatch

_CHANNELS = (3, 4)  # RGB, RGBA. A window of 1 grey picture (1, H, W) is read as what it is
_LEAST_SIDE = 8  # pixels; a smaller array is rather a table


class FrameWatch:
    """Warns if the first batch looks like pictures."""

    done = False

    def look(self, layout: Layout | None, batch: StreamBatch) -> None:
        """Look at a batch, if none was looked at before; all of it may have been read by other ranks."""
        if self.done:
            return
        steps = (batch.source >= 0).sum(0)
        read = steps[steps > 0]
        if layout is not None and len(read):
            self.done = True
            problem = seems_forgotten(layout, batch.time_steps)
            if problem is not None and (read == batch.time_steps).all():
                warnings.warn(problem, stacklevel=5)


def seems_forgotten(layout: Layout, time_steps: int) -> str | None:
    """What to tell a user whose windows look like pictures; None if they do not."""
    timed = [(path, spec) for path, spec in zip(layout.paths, layout.specs, strict=True) if spec.timed and spec.dtype]
    if not timed or not all(_is_picture(spec, time_steps) for _, spec in timed):
        return None
    path, spec = timed[0]
    kind = spec._replace(shape=(time_steps, *spec.shape))
    with_channel = (time_steps, 1, *spec.shape)
    return (
        "time_steps is not given, so each item is taken for a window of time steps, and the first items look like "
        f"pictures: {path}, {kind}, is read as {time_steps} steps of {spec.shape}. If an item is one time step, pass "
        f"time_steps= to StreamDataset. If you mean windows of {time_steps} steps, yield them with a channel axis, "
        f"{with_channel}, or ignore this: warnings.filterwarnings('ignore', 'time_steps is not given')"
    )


def _is_picture(spec: Spec, time_steps: int) -> bool:
    if len(spec.shape) != 2:
        return False
    height, width = spec.shape
    if time_steps in _CHANNELS and min(height, width) >= _LEAST_SIDE:
        return True
    height, width, channels = time_steps, *spec.shape
    return spec.dtype is torch.uint8 and channels in _CHANNELS and min(height, width) >= _LEAST_SIDE
