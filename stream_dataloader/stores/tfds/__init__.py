"""TFDS and RLDS datasets in ArrayRecord files: an episode's nested steps are a stream; TensorFlow is not needed.

`store` is the factory, `records` fetches an episode through `server`, a process of its own, and `episode` decodes it.
It imports `_base`. Open `store` first.
"""

from stream_dataloader.stores.tfds.store import TfdsStore

__all__ = ["TfdsStore"]
