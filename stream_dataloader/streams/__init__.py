"""Factories for frequent kinds of sources, to be passed to `StreamDataset` as `open_stream`."""

from stream_dataloader.streams.array import ArrayStream

__all__ = ["ArrayStream"]
