"""Contracts that users' own loaders and streams can be run through, as the library's are."""

from stream_dataloader.resume_contract import batch_key, check_resume
from stream_dataloader.stream_contract import StreamContract

__all__ = ["StreamContract", "batch_key", "check_resume"]
