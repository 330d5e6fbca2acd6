"""Zarr replay buffers, by the package `zarr`.

`store` says what a stream is, `opened` opens the arrays, `arrays` reads their chunks, and `chunks` checks these.
"""

from stream_dataloader.stores.zarr.store import ZarrStore

__all__ = ["ZarrStore"]
