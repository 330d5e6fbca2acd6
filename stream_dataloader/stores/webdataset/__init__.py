"""WebDataset's tars: samples are members that share a key, streams are samples that share a prefix of it.

`members` lists what is in a tar, `store` which samples are a stream, `samples` reads and decodes them. It imports
`_base` and `streams`, not the package webdataset. Open `store` first.
"""

from stream_dataloader.stores.webdataset.store import WebDatasetStore

__all__ = ["WebDatasetStore"]
