"""Tables as streams: Parquet, Arrow IPC (Feather 2), and datasets of Hugging Face.

`tables` reads files and a `Dataset`, `shards` reads an `IterableDataset`, and
`columns` converts columns to arrays. Open `store` first.
"""

from stream_dataloader.stores.parquet.shards import ShardStore
from stream_dataloader.stores.parquet.store import ParquetStore

__all__ = ["ParquetStore", "ShardStore"]
