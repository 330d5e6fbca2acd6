"""Text, as bytes, characters or tokens.

`stream` is the factory. `bytes` reads a file, as UTF-8 whatever its encoding is, and `blocks` cuts it; `units` are the
bytes, characters or tokens in them, as `numbers`, and items. It imports `_media` and `cache`. Open `stream` first.
"""

from stream_dataloader.streams.text.stream import TextStream

__all__ = ["TextStream"]
