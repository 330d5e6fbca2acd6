"""Rows of arrays.

`stream` is the factory, `tables` reads `.npy` files and arrays in memory, and `hdf5` datasets. Open `stream` first.
"""

from stream_dataloader.streams.array.stream import ArrayStream

__all__ = ["ArrayStream"]
