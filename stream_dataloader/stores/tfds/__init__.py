"""TFDS and RLDS datasets in ArrayRecord files, without TensorFlow.

`records` fetches an episode, `store` decodes it.
"""

from stream_dataloader.stores.tfds.store import TfdsStore

__all__ = ["TfdsStore"]
