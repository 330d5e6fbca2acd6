"""The memory-mapped store. Open `store` first."""

from stream_dataloader.stores.memmap.store import MemmapStore
from stream_dataloader.stores.memmap.writer import MemmapPacker

__all__ = ["MemmapPacker", "MemmapStore"]
