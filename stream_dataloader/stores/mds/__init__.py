"""MDS, the format of mosaicml-streaming, without that package.

Open `index` first, which describes the content of a dataset.
"""

from stream_dataloader.stores.mds.packer import MdsPacker
from stream_dataloader.stores.mds.store import MdsStore
from stream_dataloader.stores.mds.writer import MdsWriter

__all__ = ["MdsPacker", "MdsStore", "MdsWriter"]
