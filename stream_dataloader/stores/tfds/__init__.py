"""TFDS and RLDS datasets in ArrayRecord files: an episode's nested steps are a stream; TensorFlow is not needed.

`store` is the factory, `records` fetches an episode, and `episode` decodes it.
"""

from stream_dataloader.stores.tfds.store import TfdsStore

__all__ = ["TfdsStore"]
