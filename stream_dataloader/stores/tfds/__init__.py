"""TFDS and RLDS datasets in ArrayRecord files: an episode's nested steps are a stream; TensorFlow is not needed.

`builder` finds out what a builder's directory holds, `records` fetches an episode's record through `server`, which runs
in a process of its own, `episode` decodes it step by step, `store` puts them together. It imports `_base`. Open `store`
first.
"""

from stream_dataloader.stores.tfds.store import TfdsStore

__all__ = ["TfdsStore"]
