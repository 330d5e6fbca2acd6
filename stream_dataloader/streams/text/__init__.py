"""Text, as bytes, characters or tokens.

`stream` is the factory. A file is read as `bytes` and cut into `blocks` by its `encoding`; `units` are the bytes,
characters or tokens in them, as `numbers`, and become `items`. It imports `_media` and `cache`. Open `stream` first.
"""

from stream_dataloader.streams.text.stream import TextStream

__all__ = ["TextStream"]
