"""What `TensorDict.memmap` and `TensorDict.save` wrote; tensordict itself is not needed.

`saved` reads what is in the folder, `store` makes streams of it. It imports `_base`. Open `saved` first.
"""

from stream_dataloader.stores.tensordict.store import TensorDictStore

__all__ = ["TensorDictStore"]
