"""WebDataset's tars: samples are members that share a key, streams are samples that share a prefix of it.

`shards` finds the tars, `members` reads their headers into an index that is kept, `decoding` decodes members by their
extensions, `store` groups samples to streams and reads them. It imports `_base` and `streams`; not the package that is
called webdataset. Open `store` first.
"""

from stream_dataloader.stores.webdataset.store import WebDatasetStore

__all__ = ["WebDatasetStore"]
