"""Pictures of an epoch: which stream lies in which lane when.

`timeline` finds out what lanes read, and `picture` shows it. Open `timeline` first.
"""

from stream_dataloader.visualize.picture import Segment, Timeline
from stream_dataloader.visualize.timeline import timeline

__all__ = ["Segment", "Timeline", "timeline"]
