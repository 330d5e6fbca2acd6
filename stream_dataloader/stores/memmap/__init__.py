"""The memory-mapped store: one flat file a leaf, all streams' steps end to end, and a table of where they lie.

`store` says what is in a store and reads it, `writer` writes it. It imports `_base`. Open `store` first.
"""

from stream_dataloader.stores.memmap.store import MemmapStore
from stream_dataloader.stores.memmap.writer import MemmapPacker

__all__ = ["MemmapPacker", "MemmapStore"]
