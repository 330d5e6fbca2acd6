"""WebDataset's tars: members with one key are a sample, and runs of samples are a stream.

`members` lists the members of a tar, `samples` reads and decodes them. Open `store` first.
"""

from stream_dataloader.stores.webdataset.store import WebDatasetStore

__all__ = ["WebDatasetStore"]
