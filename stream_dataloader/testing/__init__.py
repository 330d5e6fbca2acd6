"""Contracts that test users' loaders and streams, as they test the library's own.

Open `resume` first.
"""

from stream_dataloader.testing.resume import batch_key, check_resume
from stream_dataloader.testing.stores import StoreContract
from stream_dataloader.testing.streams import StreamContract

__all__ = ["StoreContract", "StreamContract", "batch_key", "check_resume"]
