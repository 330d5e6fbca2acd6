"""LMDB: windows of steps as values, or existing databases.

Open `store` first, which describes the content of a store.
"""

from stream_dataloader.stores.lmdb.store import LmdbStore
from stream_dataloader.stores.lmdb.writer import LmdbPacker

__all__ = ["LmdbPacker", "LmdbStore"]
