"""Tables as streams: Parquet, Arrow IPC (Feather 2), and those of datasets.

`tables` reads files and a `Dataset`, `shards` an `IterableDataset`, and
`columns` makes arrays. Open `store` first.
"""

from stream_dataloader.stores.parquet.shards import ShardStore
from stream_dataloader.stores.parquet.store import ParquetStore

__all__ = ["ParquetStore", "ShardStore"]
