"""Text, as bytes, characters or tokens.

`stream` is the factory; a file is read as `bytes`, decoded by `encoding`, cut into `blocks`, whose `units` become
`numbers`. It imports `_media` and `cache`. Open `stream` first.
"""

from stream_dataloader.streams.text.stream import TextStream

__all__ = ["TextStream"]
