"""Assembly of windows into one batch.

A worker's `writer` puts its lanes' windows into a slot of shared memory, or into a `block` of its own. Their
description travels to the main process as a `part`. There, `layout_check` compares layouts, and `regroup` makes the
batch, or `lane_windows` the list for `collate_fn`. `slots` lays out a slot, `slot_pool` finds a free one. This room
imports `items`, `batch` and the rooms below. Open `part` first, then `writer`.
"""
