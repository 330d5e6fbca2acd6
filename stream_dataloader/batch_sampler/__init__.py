"""Coherent lanes for torch's own `DataLoader`: `LaneBatchSampler`, and functions that make a `StreamBatch` from it."""

from stream_dataloader.batch_sampler.drawing import LaneIndex
from stream_dataloader.batch_sampler.lane_batches import collate_lanes, lane_dataset
from stream_dataloader.batch_sampler.sampler import LaneBatchSampler

__all__ = ["LaneBatchSampler", "LaneIndex", "collate_lanes", "lane_dataset"]
