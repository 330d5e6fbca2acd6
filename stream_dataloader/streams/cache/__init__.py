"""Files from URLs, fetched once for all workers. Open `file_cache` first."""

from stream_dataloader.streams.cache.file_cache import FileCache

__all__ = ["FileCache"]
