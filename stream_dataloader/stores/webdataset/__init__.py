"""WebDataset's tars: samples are members that share a key, streams are samples that share a prefix of it.

`members` reads the headers of tars into an index that is kept, `streams` groups samples to streams, `decoding` decodes
members by their extensions, `samples` reads a stream's at their places, `store` finds the tars and is the factory. It
imports `_base` and `streams` of the package; not the package that is called webdataset. Open `store` first.
"""

from stream_dataloader.stores.webdataset.store import WebDatasetStore

__all__ = ["WebDatasetStore"]
