"""Hints for names that users of other libraries try: options, names to import, and fields of a batch.

Guarantee: nothing here runs before a call has failed.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

__all__ = ["field_hint", "hint_for", "hinted", "room_of"]

_Called = TypeVar("_Called", bound=Callable[..., Any])

_LANES = "batch_size= of StreamDataset is the number of lanes"
_STEPS = "time_steps= of StreamDataset is the length of a window"
_WORKERS = "num_workers= of StreamDataLoader"
_AHEAD = "prefetch_factor= of StreamDataLoader is the number of batches that each worker reads ahead"
_RANKS = "rank= and world_size= of StreamDataLoader; torch.distributed is asked if they are left out"
_ENDLESS = 'padding_mode="cycle" of StreamDataset never ends'
_SIZE = "size=(height, width) of VideoStream and ImageFolderStream"
_MAPPED = "have open_stream apply it to each item: yield transform(item)"

#: Names of options in other libraries (torch, grain, webdataset, datasets, pytorch-stream-dataloader, SPDL, litdata).
_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("num_lanes", "lanes", "n_lanes", "num_streams", "num_envs", "bs", "batch"), _LANES),
    **dict.fromkeys(
        ("seq_len", "seq_length", "sequence_length", "max_seq_len", "block_size", "bptt", "tbptt_steps", "chunk_size"),
        _STEPS,
    ),
    **dict.fromkeys(("clip_len", "frames_per_clip", "num_frames", "window", "window_size", "num_steps"), _STEPS),
    **dict.fromkeys(("workers", "worker_count", "n_workers", "num_threads", "num_proc", "concurrency"), _WORKERS),
    **{name: f"{name}= of StreamDataLoader" for name in ("num_workers", "prefetch_factor", "pin_memory", "collate_fn")},
    **dict.fromkeys(("prefetch", "prefetch_size", "buffer_size", "predownload", "num_prefetch"), _AHEAD),
    **dict.fromkeys(("num_replicas", "num_shards", "shard_index", "shard_count", "shard_id", "num_ranks"), _RANKS),
    **dict.fromkeys(("repeat", "num_epochs", "infinite", "loop"), _ENDLESS),
    **dict.fromkeys(("transform", "transforms", "map_fn", "operations", "target_transform"), _MAPPED),
    **dict.fromkeys(("stream_list", "paths", "files", "urls", "data", "input_dir", "data_source"), "sources="),
    **dict.fromkeys(("streamer", "iterator_fun", "iterator_fn", "factory", "open_fn", "stream_fn"), "open_stream="),
    **dict.fromkeys(("sampler", "batch_sampler"), "shuffle= and schedule= of StreamDataset decide the order"),
    **dict.fromkeys(("generator", "random_state", "shuffle_seed"), "seed= of StreamDataset"),
    **dict.fromkeys(("collate", "collator", "data_collator"), "collate_fn= of StreamDataLoader"),
    "drop_last": 'padding_mode="drop" of StreamDataset ends an epoch at the first idle lane',
    "drop_remainder": 'padding_mode="drop" of StreamDataset ends an epoch at the first idle lane',
    "shuffle_buffer": "shuffle=True of StreamDataset shuffles all sources",
    "in_order": "deterministic= of StreamDataset",
    "mp_context": "multiprocessing_context= of StreamDataLoader",
    **dict.fromkeys(("resize", "height", "width", "shape", "image_size", "resolution"), _SIZE),
    **dict.fromkeys(("frame_rate", "framerate", "target_fps"), "fps= of VideoStream"),
    **dict.fromkeys(("gray", "grayscale"), 'color="gray" of VideoStream'),
    **dict.fromkeys(("bytes", "byte_level", "level"), 'units="bytes" of TextStream'),
    **dict.fromkeys(("pack", "packed", "packing"), 'windows="packed" of StreamDataset'),
    **dict.fromkeys(("mem_len", "memory_length", "cache_size", "maxlen"), "steps= of LaneCache"),
    "pin": "pin_memory= of StreamDataLoader",
}

_SHAPE = "len(batch) is B, batch.time_steps is T, and batch.data has the structure that the streams yield"
_TIMES = "batch.position counts items; for seconds yield them from the stream, in a pair or dict with the item"
_TARGETS = "yield pairs or dicts from the stream; batch.data has the same structure"

#: Names that a batch, a tensor or a tuple of tensors has elsewhere.
_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(("shape", "size", "ndim", "dtype", "batch_size", "num_lanes", "seq_len"), _SHAPE),
    **dict.fromkeys(("x", "input", "inputs", "input_ids", "images", "frames", "obs", "tokens"), "use batch.data"),
    **dict.fromkeys(("y", "target", "targets", "label", "labels", "action"), _TARGETS),
    **dict.fromkeys(
        ("source", "sources", "episode_index", "episode_id", "stream", "stream_id"), "use batch.source_index"
    ),
    **dict.fromkeys(
        ("is_start", "starts", "start", "begin", "resets"), "use batch.is_first, (T, B), or batch.reset, (B,)"
    ),
    **dict.fromkeys(("done", "dones", "ends", "is_end", "terminated"), "use batch.is_last, or recurrent.done(batch)"),
    **dict.fromkeys(
        ("attention_mask", "padding_mask", "pad_mask", "padding", "is_pad"), "use batch.is_padding, or batch.mask"
    ),
    **dict.fromkeys(("step", "index", "batch_idx"), "use batch.batch_index"),
    **dict.fromkeys(("t", "time", "frame_index", "offset"), "use batch.position"),
    **dict.fromkeys(("timestamp", "timestamps", "times", "pts"), _TIMES),
    **{
        name: f"use recurrent.{name}(batch)"
        for name in ("cu_seqlens", "is_init", "position_ids", "prev_exists", "seq_idx")
    },
    "device": "use batch.data.device",
    "lengths": "use batch.mask.sum(0)",
}

#: Public names that are not in the package itself, by the room that has them.
_ROOMS: Mapping[str, tuple[str, ...]] = {
    "streams": (
        *(
            "ArrayStream",
            "AudioStream",
            "AudioVisualStream",
            "CameraStream",
            "FileCache",
            "ImageFolderStream",
            "Limits",
        ),
        *("NOTHING_YET", "TextStream", "VideoStream", "live", "segment_videos"),
    ),
    "stores": (
        *("Hdf5Store", "JoinedStore", "LeRobotStore", "LmdbStore", "MdsStore", "MdsWriter", "MemmapStore", "NpyStore"),
        *("ParquetStore", "TensorDictStore", "TfdsStore", "TokenStore", "WebDatasetStore", "ZarrStore"),
    ),
    "recurrent": (
        *("LaneCache", "LaneMemory", "Segments", "linear_scan", "masked_rnn"),
        *("cu_seqlens", "done", "is_init", "position_ids", "prev_exists", "segments", "seq_idx"),
    ),
    "errors": (
        *("DeviceError", "EmptySourcesError", "FailureLimitError", "GapError", "ItemError", "IteratorError"),
        *("LengthError", "NonFiniteStateError", "OpenError", "RankError", "ReadError", "StoreError"),
        *("WorkerDeathError", "WorkerError", "WorkerTimeoutError"),
    ),
    "testing": ("Audit", "RowMoves", "StoreContract", "StreamContract", "audit", "check_resume"),
}


def hint_for(name: str, known: Iterable[str]) -> str:
    """Return a hint for an option's name that does not exist, or an empty text."""
    if name in _OPTIONS:
        return _OPTIONS[name]
    close = difflib.get_close_matches(name, [*known], 1)
    return f"did you mean {close[0]}=?" if close else ""


def field_hint(name: str) -> str:
    """Return what a batch has in place of a field that does not exist, or an empty text."""
    return _FIELDS.get(name, "")


def room_of(name: str) -> str | None:
    """Return the room that has a public name."""
    return next((room for room, names in _ROOMS.items() if name in names), None)


def hinted(called: _Called) -> _Called:
    """Add hints to the TypeError for an option that a function, or the constructor of a class, does not have."""
    if not isinstance(called, type):
        return _with_hints(called)
    called.__init__ = _with_hints(called.__init__)  # type: ignore[misc]
    return called


def _with_hints(function: _Called) -> _Called:
    @functools.wraps(function)
    def taking(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError as error:
            call = error.__traceback__ and error.__traceback__.tb_next
            found = None if call else re.search(r"unexpected keyword argument '(\w+)'", str(error))
            hint = hint_for(found[1], inspect.signature(function).parameters) if found else ""
            if not hint:
                raise
            raise TypeError(f"{error}; {hint}") from None

    return cast(_Called, taking)
