"""Contracts that users' own loaders and streams can be run through, as the library's are."""

from stream_dataloader.testing.resume import batch_key, check_resume
from stream_dataloader.testing.streams import StreamContract

__all__ = ["StreamContract", "batch_key", "check_resume"]
