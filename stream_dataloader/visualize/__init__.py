"""Pictures of an epoch: which stream lies in which lane when.

`timeline` makes one of a dataset or loader whose lengths are known, without reading, or of batches that were read. It
can be shown as text, as SVG and PNG. It may import all of the package but `cli`. Open `timeline` first.
"""

from stream_dataloader.visualize.timeline import Segment, Timeline, timeline

__all__ = ["Segment", "Timeline", "timeline"]
