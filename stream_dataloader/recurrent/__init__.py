"""What models with memory carry from batch to batch, and models that take packed windows.

`state` has `RecurrentState`, for states of a fixed shape; `cache` has `LaneCache`, for attention; `memory` has
`LaneMemory`, for any value. Below them: `states` has tensors of lanes, `store` keeps them, `values` have any nesting,
`order` checks batches, `initial` says what lanes start with, `checkpoint` makes plain data. `packed` stands beside.
`conventions` has a batch's flags as other libraries name them, and `varlen` its lanes end to end. Open `state` first.
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
