"""Tables as streams: Parquet files, Arrow IPC files (Feather version 2), and Arrow IPC streams as datasets are saved.

`tables` finds the files and reads groups of their rows, `columns` makes arrays of Arrow's columns, `rows` finds the
streams among them and keeps groups, `steps` reads one stream, `store` is the factory. It imports `_base` and `streams`,
and pyarrow where it is used. Open `store` first.
"""

from stream_dataloader.stores.parquet.store import ParquetStore

__all__ = ["ParquetStore"]
