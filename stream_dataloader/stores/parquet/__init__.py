"""Tables as streams: Parquet files, Arrow IPC files (Feather version 2), and Arrow IPC streams as datasets are saved.

`tables` reads files by groups of rows, `columns` makes arrays of Arrow's columns, `rows` finds and reads the streams,
`store` is the factory. It imports `_base`, `streams`, and pyarrow where it is used. Open `store` first.
"""

from stream_dataloader.stores.parquet.store import ParquetStore

__all__ = ["ParquetStore"]
