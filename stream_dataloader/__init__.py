"""Temporally coherent batches for PyTorch: row b of every batch continues row b of the batch before."""

from stream_dataloader import _own_folder as _own_folder  # before any other import
from stream_dataloader._hints import room_of
from stream_dataloader._ranks.merged_states import merge_states, split_state
from stream_dataloader._schedule.rules import split_batch_size, split_dataset_sizes
from stream_dataloader._torch_loader import regroup
from stream_dataloader.batch import StreamBatch
from stream_dataloader.batch_sampler import LaneBatchSampler, LaneIndex
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import (
    DeviceError,
    EmptySourcesError,
    FailureLimitError,
    ForkedIteratorError,
    GapError,
    ItemError,
    LengthError,
    NonFiniteStateError,
    OpenError,
    RankError,
    ReadError,
    StaleIteratorError,
    StateError,
    StreamDataLoaderError,
    StreamError,
    WorkerDeathError,
    WorkerError,
    WorkerTimeoutError,
)
from stream_dataloader.interleaved import interleave
from stream_dataloader.member_lanes import side_by_side
from stream_dataloader.sectioning import Sections
from stream_dataloader.stream_info import StreamInfo, get_stream_info

__version__ = "0.1.0"


TYPE_CHECKING = False  # to type checkers it is True: with the function below, any name would be there for them
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Say where a public name is that this module does not have."""
        if (room := room_of(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Of an AttributeError here, `from stream_dataloader import` would drop the text.
        raise ImportError(f"{name} is in {__name__}.{room}: from {__name__}.{room} import {name}", name=name)


__all__ = [
    "DeviceError",
    "EmptySourcesError",
    "FailureLimitError",
    "ForkedIteratorError",
    "GapError",
    "ItemError",
    "LaneBatchSampler",
    "LaneIndex",
    "LengthError",
    "NonFiniteStateError",
    "OpenError",
    "RankError",
    "ReadError",
    "Sections",
    "StaleIteratorError",
    "StateError",
    "StreamBatch",
    "StreamDataLoader",
    "StreamDataLoaderError",
    "StreamDataset",
    "StreamError",
    "StreamInfo",
    "WorkerDeathError",
    "WorkerError",
    "WorkerTimeoutError",
    "get_stream_info",
    "interleave",
    "merge_states",
    "regroup",
    "side_by_side",
    "split_batch_size",
    "split_dataset_sizes",
    "split_state",
]
