"""What differs between the versions of PyAV that are supported, 17 and later: all of it stands here."""

from __future__ import annotations

from typing import Any

import av
from av.sidedata.sidedata import SideDataContainer

__all__ = ["ACCURATE_BILINEAR", "ANY_METADATA", "drop_reserved_tags", "side_data"]

_MAJOR = int(av.__version__.split(".")[0])

#: Options for `av.open`: a title that is not UTF-8 must not fail. From 19 on it never does.
ANY_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if _MAJOR < 19 else {}

#: SWS_BILINEAR | SWS_ACCURATE_RND, which `Interpolation` has names for from 18 on.
ACCURATE_BILINEAR = 0x2 | 0x40000


_RESERVED, _UNSPECIFIED = 0, 2  # of AVColorPrimaries and AVColorTransferCharacteristic


def drop_reserved_tags(frame: av.VideoFrame) -> None:
    """Take off reserved tags of NVIDIA's decoder. Before 18, such a frame cannot be converted (PyAV's issue 2208)."""
    for tag in ("color_primaries", "color_trc") if _MAJOR < 18 else ():
        if getattr(frame, tag) == _RESERVED:
            setattr(frame, tag, _UNSPECIFIED)


def side_data(frame: av.VideoFrame) -> SideDataContainer:
    """A frame's side data. Before 19, `frame.side_data` and its frame are a circle, freed with the garbage."""
    return SideDataContainer(frame)  # type: ignore[call-arg]
