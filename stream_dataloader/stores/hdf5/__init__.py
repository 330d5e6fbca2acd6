"""Episodes in HDF5 files: a group is a stream, and its datasets are the leaves of the items.

`index` finds files, groups and leaves, `files` opens them, `store` reads them. It imports `_base`, and `streams.array`
for rows of datasets. Open `index` first.
"""

from stream_dataloader.stores.hdf5.store import Hdf5Store

__all__ = ["Hdf5Store"]
