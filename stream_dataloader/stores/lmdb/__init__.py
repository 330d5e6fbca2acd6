"""LMDB: windows of steps as values of a few databases, or databases that people already have.

`format` says what is in a store, `pages` checks a database's pages before LMDB reads them, `databases` opens them,
`windows` writes and reads a value, `store` reads a store that was packed, `plain` any other LMDB, `writer` packs, and
`files` makes streams of many small files. It imports `_base`. Open `format` first.
"""

from stream_dataloader.stores.lmdb.files import files_as_streams
from stream_dataloader.stores.lmdb.store import LmdbStore
from stream_dataloader.stores.lmdb.writer import LmdbPacker

__all__ = ["LmdbPacker", "LmdbStore", "files_as_streams"]
