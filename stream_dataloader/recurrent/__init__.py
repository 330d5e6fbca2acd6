"""What models with memory carry from batch to batch, and models that take packed windows.

`state` has `RecurrentState`, for states of a fixed shape; `cache` has `LaneCache`, for attention; `memory` has
`LaneMemory`, for any value. Below them: `states` has tensors of lanes, `store` keeps them, `values` have any nesting,
`order` checks batches, `initial` says what lanes start with, `checkpoint` makes plain data. `packed` stands beside.
Open `state` first.
"""

from stream_dataloader.recurrent.cache import LaneCache
from stream_dataloader.recurrent.memory import LaneMemory
from stream_dataloader.recurrent.packed import linear_scan, masked_rnn
from stream_dataloader.recurrent.state import RecurrentState

__all__ = ["LaneCache", "LaneMemory", "RecurrentState", "linear_scan", "masked_rnn"]
