"""The memory-mapped store: one flat file a leaf, all streams' steps end to end, and a table of where they lie.

Open `store` first, which says what is in a store.
"""

from stream_dataloader.stores.memmap.store import MemmapStore
from stream_dataloader.stores.memmap.writer import MemmapPacker

__all__ = ["MemmapPacker", "MemmapStore"]
