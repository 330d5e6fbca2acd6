"""Temporally coherent batches for PyTorch: row b of every batch continues row b of the batch before."""

import importlib

from stream_dataloader._engine import own_folder as _own_folder  # noqa: F401 - before any other import
from stream_dataloader._engine.hints import room_of
from stream_dataloader._engine.merging import merge_states
from stream_dataloader._engine.schedule.rules import split_batch_size, split_dataset_sizes
from stream_dataloader._engine.torch_loader import regroup
from stream_dataloader.anchors import Anchors
from stream_dataloader.batch import StreamBatch
from stream_dataloader.batch_sampler import LaneBatchSampler, LaneIndex, collate_lanes, lane_dataset
from stream_dataloader.combine.side_by_side import side_by_side
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StateError, StreamDataLoaderError, StreamError
from stream_dataloader.interleaved import interleave
from stream_dataloader.sectioning import Sections
from stream_dataloader.stream_info import StreamInfo, get_stream_info

__version__ = "0.1.0"

__all__ = [
    "Anchors",
    "LaneBatchSampler",
    "LaneIndex",
    "RecurrentState",
    "Sections",
    "StateError",
    "StreamBatch",
    "StreamDataLoader",
    "StreamDataLoaderError",
    "StreamDataset",
    "StreamError",
    "StreamInfo",
    "collate_lanes",
    "get_stream_info",
    "interleave",
    "lane_dataset",
    "merge_states",
    "regroup",
    "side_by_side",
    "split_batch_size",
    "split_dataset_sizes",
]


_ROOMS = ("integrations", "recurrent", "stores", "streams", "testing", "visualize")  # imported when first used

TYPE_CHECKING = False  # type checkers take it as True; they would accept any name if they saw `__getattr__`
if TYPE_CHECKING:
    from stream_dataloader import integrations as integrations
    from stream_dataloader import recurrent as recurrent
    from stream_dataloader import stores as stores
    from stream_dataloader import streams as streams
    from stream_dataloader import testing as testing
    from stream_dataloader import visualize as visualize
    from stream_dataloader.recurrent import RecurrentState
else:

    def __getattr__(name: str) -> object:
        """Import modules that are loaded at first use, and say where other public names are."""
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        if name == "RecurrentState":
            return importlib.import_module(f"{__name__}.recurrent").RecurrentState
        if (room := room_of(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # An ImportError, because `from stream_dataloader import` drops the text of an AttributeError.
        raise ImportError(f"{name} is in {__name__}.{room}: from {__name__}.{room} import {name}", name=name)

    def __dir__() -> list[str]:
        """List all names, including those that are not loaded yet."""
        return sorted({*globals(), *__all__, *_ROOMS})
