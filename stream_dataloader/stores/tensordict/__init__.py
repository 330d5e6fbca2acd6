"""What `TensorDict.memmap` and `TensorDict.save` wrote; tensordict itself is not needed.

`saved` reads what is in the folder, `cuts` says where streams begin, `store` puts both together. It imports `_base`.
Open `saved` first.
"""

from stream_dataloader.stores.tensordict.store import TensorDictStore

__all__ = ["TensorDictStore"]
