"""Tables as streams: Parquet, Arrow IPC (Feather version 2), and datasets that were saved.

`tables` reads files, `columns` makes arrays. Open `store` first.
"""

from stream_dataloader.stores.parquet.store import ParquetStore

__all__ = ["ParquetStore"]
