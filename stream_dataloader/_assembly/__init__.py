"""Windows become one batch.

A worker's `writer` puts its lanes' windows into a slot of shared memory, or into a `block` of its own. What the main
process needs to know of them travels as a `part`. There, `judge` compares what was read; `regroup` makes the batch, or
`lane_windows` the list for `collate_fn`. `slots` says where things lie in a slot, `slot_pool` which one is free. It
imports `_items`, `batch` and what lies below. Open `part` first, then `writer`.
"""
