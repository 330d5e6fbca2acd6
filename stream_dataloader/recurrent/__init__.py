"""The state of recurrent models, carried from batch to batch, and models that take packed windows.

`state` has `RecurrentState`, which users call. Below it: `states` has tensors of lanes, `store` keeps them, `order`
checks batches, `initial` says what lanes start with, `checkpoint` makes plain data. `packed` stands beside it. Open
`state` first.
"""

from stream_dataloader.recurrent.checkpoint import merge_states
from stream_dataloader.recurrent.packed import linear_scan, masked_rnn
from stream_dataloader.recurrent.state import RecurrentState

__all__ = ["RecurrentState", "linear_scan", "masked_rnn", "merge_states"]
