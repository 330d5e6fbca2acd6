"""Files from URLs, fetched once for all workers.

`file_cache` is what streams ask, `entry` holds what the cache has of one URL, `remote` talks to the server,
`file_lock` keeps processes apart, and `kept` has tables that took long to work out. It imports nothing of the package.
Open `file_cache` first.
"""

from stream_dataloader.streams.cache.file_cache import FileCache

__all__ = ["FileCache"]
