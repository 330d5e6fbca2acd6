"""Files from URLs, fetched once for all workers.

`file_cache` is what streams ask, `entry` one file in it, `remote` the other side and `file_lock` what keeps processes
apart. It imports nothing of the package but `errors`. Open `file_cache` first.
"""

from stream_dataloader.streams.cache.file_cache import FileCache

__all__ = ["FileCache"]
