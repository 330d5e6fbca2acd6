"""Replay buffers in Zarr: flat arrays of all streams' steps, and where each stream ends.

`arrays` reads rows of chunked arrays, `index` finds arrays and ranges, `store` opens streams. It imports `_base`. Open
`index` first.
"""

from stream_dataloader.stores.zarr.store import ZarrStore

__all__ = ["ZarrStore"]
