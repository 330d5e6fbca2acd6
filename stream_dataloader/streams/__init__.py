"""Factories for common kinds of sources, to pass to `StreamDataset` as `open_stream`.

A factory is cheap to build and to pickle, and passes `testing.StreamContract`. Open `images` first: a complete
factory in one file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stream_dataloader.protocols import NOTHING_YET
    from stream_dataloader.streams._media.limits import Limits
    from stream_dataloader.streams.array import ArrayStream
    from stream_dataloader.streams.audio import AudioStream
    from stream_dataloader.streams.audiovisual import AudioVisualStream
    from stream_dataloader.streams.background import live
    from stream_dataloader.streams.cache import FileCache
    from stream_dataloader.streams.camera import CameraStream
    from stream_dataloader.streams.images import ImageFolderStream
    from stream_dataloader.streams.text import TextStream
    from stream_dataloader.streams.video import VideoStream
    from stream_dataloader.streams.video.frame_index import segment_videos

__all__ = [
    "NOTHING_YET",
    "ArrayStream",
    "AudioStream",
    "AudioVisualStream",
    "CameraStream",
    "FileCache",
    "ImageFolderStream",
    "Limits",
    "TextStream",
    "VideoStream",
    "live",
    "segment_videos",
]

_MODULES = {
    "ArrayStream": "array",
    "AudioStream": "audio",
    "AudioVisualStream": "audiovisual",
    "CameraStream": "camera",
    "FileCache": "cache",
    "ImageFolderStream": "images",
    "Limits": "_media.limits",
    "TextStream": "text",
    "VideoStream": "video",
    "live": "background",
    "segment_videos": "video.frame_index",
}


def __getattr__(name: str) -> Any:
    """Import a factory on first use."""
    if name == "NOTHING_YET":
        return importlib.import_module("stream_dataloader.protocols").NOTHING_YET
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
