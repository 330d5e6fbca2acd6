"""The memory-mapped store: one flat file a leaf, all streams' steps end to end. Open `store` first."""

from stream_dataloader.stores.memmap.store import MemmapStore
from stream_dataloader.stores.memmap.writer import MemmapPacker

__all__ = ["MemmapPacker", "MemmapStore"]
