"""Contracts that test users' loaders and streams, and an audit of any loader. The library's own tests use them too.

Open `resume` first.
"""

from stream_dataloader.testing.audit import Audit, RowMoves, audit
from stream_dataloader.testing.resume import check_resume
from stream_dataloader.testing.stores import StoreContract
from stream_dataloader.testing.streams import StreamContract

__all__ = ["Audit", "RowMoves", "StoreContract", "StreamContract", "audit", "check_resume"]
