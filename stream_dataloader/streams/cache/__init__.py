"""Cache of files from URLs, fetched once for all workers. Open `file_cache` first."""

from stream_dataloader.streams.cache.file_cache import (
    FileCache,
    LocalFile,
    cache_directory,
    is_url,
    keep_tables,
    kept_tables,
    open_local,
)

__all__ = ["FileCache", "LocalFile", "cache_directory", "is_url", "keep_tables", "kept_tables", "open_local"]
