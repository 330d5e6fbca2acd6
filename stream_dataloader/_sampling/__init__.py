"""Batches of indices for torch's own `DataLoader`: what `LaneBatchSampler` is made of.

`lane_index` is what it yields, and `position` draws the batches of an epoch and knows where the sampler stands from one
to the next. It imports `_map_style` for groups and `_schedule`. Open `position` first.
"""
