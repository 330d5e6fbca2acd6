"""What differs between the versions of PyAV that are supported, 17 and later: all of it stands here.

Guarantee: the same file gives the same pictures with each of them, as far as their FFmpeg does.
"""

from __future__ import annotations

from typing import Any

import av
from av.sidedata.sidedata import SideDataContainer

__all__ = ["ACCURATE_BILINEAR", "ANY_METADATA", "drop_reserved_tags", "side_data"]

_MAJOR = int(av.__version__.split(".")[0])

#: Options for `av.open`: a title that is not UTF-8 must not fail. From 19 on it never does.
ANY_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if _MAJOR < 19 else {}

#: SWS_BILINEAR | SWS_ACCURATE_RND, which `Interpolation` has names for from 18 on. As a number all versions take it.
ACCURATE_BILINEAR = 0x2 | 0x40000


_RESERVED, _UNSPECIFIED = 0, 2  # of AVColorPrimaries and AVColorTransferCharacteristic


def drop_reserved_tags(frame: av.VideoFrame) -> None:
    """Take reserved values off a frame's tags, as NVIDIA's decoder may leave them.

    Before 18, such a frame cannot be converted (PyAV's issue 2208). Neither tag has a part in how it is.
    """
    if _MAJOR < 18 and frame.color_primaries == _RESERVED:
        frame.color_primaries = _UNSPECIFIED
    if _MAJOR < 18 and frame.color_trc == _RESERVED:
        frame.color_trc = _UNSPECIFIED


def side_data(frame: av.VideoFrame) -> SideDataContainer:
    """A frame's side data.

    Before 19, `frame.side_data` is kept by the frame, and refers to it: such a frame, and memory that the decoder could
    use again, are only freed when garbage is collected.
    """
    return SideDataContainer(frame)  # type: ignore[call-arg]
