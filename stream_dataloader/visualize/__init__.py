"""Pictures of an epoch: the stream in each lane over time.

`timeline` finds the streams that lanes read, and `picture` shows them. Open `timeline` first.
"""

from stream_dataloader.visualize.picture import Timeline
from stream_dataloader.visualize.timeline import timeline

__all__ = ["Timeline", "timeline"]
