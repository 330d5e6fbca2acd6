"""MDS, the format of mosaicml-streaming: shards of samples, read and written without that package.

`index` says what is in a dataset, `shards` has its shards on this disk and maps them, `encodings` turns bytes into
values, `streams` says what its items are and which samples are a stream, `store` reads them, `writer` writes shards and
datasets, and `packer` does so by several processes at once. Open `index` first.
"""

from stream_dataloader.stores.mds.packer import MdsPacker
from stream_dataloader.stores.mds.store import MdsStore
from stream_dataloader.stores.mds.writer import MdsWriter

__all__ = ["MdsPacker", "MdsStore", "MdsWriter"]
