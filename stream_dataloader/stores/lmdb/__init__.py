"""LMDB: windows of steps as values, or databases that people already have.

Open `store` first, which says what is in a store.
"""

from stream_dataloader.stores.lmdb.store import LmdbStore
from stream_dataloader.stores.lmdb.writer import LmdbPacker

__all__ = ["LmdbPacker", "LmdbStore"]
