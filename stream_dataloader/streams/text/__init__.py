"""Text, as bytes, characters or tokens.

`stream` is the factory, and `reader` makes items. `bytes` reads a file, as UTF-8 whatever its encoding is, and
`numbers` has vocabularies and tokenizers. It imports `_media` and `cache`. Open `stream` first.
"""

from stream_dataloader.streams.text.stream import TextStream

__all__ = ["TextStream"]
