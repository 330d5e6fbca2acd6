"""Rows of arrays. Open `stream` first, then `tables` and `hdf5`."""

from stream_dataloader.streams.array.stream import ArrayStream

__all__ = ["ArrayStream"]
