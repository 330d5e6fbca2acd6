"""TFDS and RLDS datasets in ArrayRecord files: an episode's nested steps are a stream; TensorFlow is not needed.

`records` fetches an episode, `store` decodes it.
"""

from stream_dataloader.stores.tfds.store import TfdsStore

__all__ = ["TfdsStore"]
