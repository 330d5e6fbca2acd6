"""State that models carry from batch to batch, and models for packed windows.

`state` has `RecurrentState`, for states of a fixed shape; `cache` has `LaneCache`, for attention; `memory` has
`LaneMemory`, for any value. They use `states` (tensors of lanes), `store` (which keeps them), `values` (plain data of
any nesting), `order` (which checks batches), `initial` (the state at a stream's start) and `checkpoint` (saved states).
`packed` has models for packed windows, `conventions` gives a batch's flags the names of other libraries, and `varlen`
lays lanes end to end. Open `state` first.
"""

from stream_dataloader.recurrent.cache import LaneCache
from stream_dataloader.recurrent.conventions import (
    cu_seqlens,
    done,
    is_init,
    position_ids,
    prev_exists,
    segments,
    seq_idx,
)
from stream_dataloader.recurrent.memory import LaneMemory
from stream_dataloader.recurrent.packed import linear_scan, masked_rnn
from stream_dataloader.recurrent.state import RecurrentState
from stream_dataloader.recurrent.varlen import Segments

__all__ = [
    "LaneCache",
    "LaneMemory",
    "RecurrentState",
    "Segments",
    "cu_seqlens",
    "done",
    "is_init",
    "linear_scan",
    "masked_rnn",
    "position_ids",
    "prev_exists",
    "segments",
    "seq_idx",
]
