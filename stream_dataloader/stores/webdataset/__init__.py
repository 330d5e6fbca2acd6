"""WebDataset's tars: members with one key are a sample, runs of samples a stream.

`members` lists what is in a tar, `samples` reads and decodes it. Open `store` first.
"""

from stream_dataloader.stores.webdataset.store import WebDatasetStore

__all__ = ["WebDatasetStore"]
