"""LMDB: windows of steps as values of a few databases, or databases that people already have.

`store` says what is in a store and reads it, or any other LMDB, `pages` finds the values in a file, `windows` writes
and reads a value, and `writer` packs. It imports `_base`. Open `store` first.
"""

from stream_dataloader.stores.lmdb.store import LmdbStore
from stream_dataloader.stores.lmdb.writer import LmdbPacker

__all__ = ["LmdbPacker", "LmdbStore"]
