"""Batches of indices for torch's own `DataLoader`: what `LaneBatchSampler` is made of.

`lane_index` is what it yields, `reading` draws the batches of one epoch, and `position` knows where the sampler stands
from one epoch to the next. It imports `_map_style` for groups and `_schedule`. Open `reading` first.
"""
