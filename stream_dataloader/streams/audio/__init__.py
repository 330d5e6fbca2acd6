"""Sound, as windows of samples.

`stream` is the factory, `samples` reads from any sample on, `decoding` seeks and decodes, `clock` finds gaps in time
stamps, `resample` converts, and `headers` reads how long a file says it is. It imports `_media` and `cache`. Open
`stream` first.
"""

from stream_dataloader.streams.audio.stream import AudioStream

__all__ = ["AudioStream"]
