"""Sound, as windows of samples.

`stream` is the factory, `samples` reads from any sample on, `decoding` seeks and decodes, `resample` converts, and
`headers` knows how long a file's audio is. It imports `_media` and `cache`. Open `stream` first.
"""

from stream_dataloader.streams.audio.stream import AudioStream

__all__ = ["AudioStream"]
