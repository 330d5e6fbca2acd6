"""MDS, the format of mosaicml-streaming: shards of samples, read and written without that package.

`index` says what is in a dataset, `shards` maps one shard, `encodings` and `pictures` turn its bytes into values,
`fetch` has them on this disk, `streams` says what its items are and which samples are a stream, by a file of `table`
where that is not plain, `steps` reads one stream, `store` all of them, `writer` writes shards and datasets, and
`packer` does so by several processes at once. Open `index` first.
"""

from stream_dataloader.stores.mds.packer import MdsPacker
from stream_dataloader.stores.mds.store import MdsStore
from stream_dataloader.stores.mds.writer import MdsWriter

__all__ = ["MdsPacker", "MdsStore", "MdsWriter"]
