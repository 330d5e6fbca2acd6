"""Format of delivered pictures, and the converters that write decoded pictures directly into a batch.

Guarantee: all pictures have the requested shape and dtype, and colours follow the picture's own tags. Conversion by
planes ("gbrp") is the most accurate way to RGB, and the fastest one that respects tags. `conversion="swscale"` gives
the pixels of PyAV's `to_ndarray(format="rgb24")` instead, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.opencv import import_opencv
from stream_dataloader.streams._media.section import check_options

if TYPE_CHECKING:
    import av

__all__ = ["ArrayConverter", "AvConverter", "Conversion", "FrameOptions", "Picture", "PictureOptions", "picture_with"]

#: Ways to convert a decoded YUV picture to RGB.
Conversion = Literal["accurate", "swscale"]

# Gray is the unchanged luma: libswscale converts between matrices unless both are its default.
_LUMA = {"src_colorspace": 5, "dst_colorspace": 5, "dst_color_range": 2}  # SWS_CS_ITU601, AVCOL_RANGE_JPEG
_LARGEST_SIDE = 1 << 16
_UNIT = np.float32(1 / 255)


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """Format of a stream's pictures.

    Attributes:
        size: `(height, width)` in pixels; None keeps the size of a stream's first picture.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"`, or `"gray"`: one channel, the luma, over the full range.
        dtype: `"uint8"`, 0 to 255, or `"float32"`, 0 to 1; or one of NumPy or torch.
        fit: Way to fit a picture of another aspect ratio to `size`: `"stretch"`; `"letterbox"`, the whole picture
            between black borders; or `"crop"`, the middle of the picture.
        limits: Largest size of a picture that is decoded; see `Limits`.

    Raises:
        ValueError: An option has an unknown value, or a size is not positive.
    """

    _yields_steps: ClassVar[bool] = True

    size: tuple[int, int] | None = None
    layout: Literal["CHW", "HWC"] = "CHW"
    color: Literal["rgb", "gray"] = "rgb"
    dtype: Any = "uint8"
    fit: Literal["stretch", "letterbox", "crop"] = "stretch"
    limits: Limits | None = None

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        if self.size is not None:
            size = tuple(self.size) if isinstance(self.size, (tuple, list)) else ()
            whole = len(size) == 2 and all(isinstance(side, (int, np.integer)) for side in size)
            if not whole or not all(0 < side <= _LARGEST_SIDE for side in size):
                raise ValueError(f"size is {self.size!r}; give (height, width), 1 to {_LARGEST_SIDE}, or None")
            object.__setattr__(self, "size", (int(size[0]), int(size[1])))

    @property
    def picture(self) -> Picture:
        names = ("size", "layout", "color", "dtype", "fit", "limits")
        return Picture(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Picture(PictureOptions):
    """Format of one picture."""

    upright: bool = True  # turn images as their EXIF data say
    deep: bool = False  # images of 16 bits a channel are delivered as uint16, 0 to 65535, where `dtype` is uint8
    conversion: Conversion = "accurate"  # of decoded frames

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a picture, once `size` is known."""
        assert self.size is not None
        height, width = self.size
        channels = 3 if self.color == "rgb" else 1
        return (channels, height, width) if self.layout == "CHW" else (height, width, channels)

    def empty(self) -> Any:
        return np.empty(self.shape, "uint16" if self.deep else self.dtype)


@functools.lru_cache(256)
def picture_with(picture: Picture, **changes: Any) -> Picture:
    """Return a copy with other options. It is cached, because stores ask for it with each image."""
    return dataclasses.replace(picture, **changes)


@dataclass(frozen=True, kw_only=True)
class FrameOptions(PictureOptions):
    """Format of frames that PyAV decodes.

    Attributes:
        conversion: Conversion from YUV to RGB: `"accurate"`, each value the nearest one; or `"swscale"`, the pixels of
            PyAV's `to_ndarray(format="rgb24")`, bit for bit.
    """

    conversion: Conversion = "accurate"

    @property
    def picture(self) -> Picture:
        return dataclasses.replace(super().picture, conversion=self.conversion)


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    name = "float32" if dtype is float else str(np.dtype(dtype))
    if name not in ("uint8", "float32"):
        raise ValueError(f"dtype is {name}; use uint8 or float32")
    return name


class _Orientation(NamedTuple):
    """Steps that turn a picture upright: mirror it, then turn it counter-clockwise by quarters."""

    turns: int = 0
    mirrored: bool = False


_UPRIGHT = _Orientation()


def _orientation(frame: av.VideoFrame) -> _Orientation:
    """Read the orientation from the frame's display matrix, which maps a pixel at x, y to ax + cy, bx + dy."""
    from stream_dataloader.streams._media.container import side_data

    found = side_data(frame)
    matrix: Any = found.get("DISPLAYMATRIX") if len(found) else None
    if matrix is None:
        return _UPRIGHT
    a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
    mirrored = a * d - b * c < 0
    if mirrored:
        a, b = -a, -b
    return _Orientation(round(math.atan2(-b, a) / (math.pi / 2)) % 4, mirrored)


class _Plan(NamedTuple):
    """Steps that bring a picture to its place: scale, mirror, turn, cut, and copy."""

    width: int  # before turning
    height: int
    upright: _Orientation
    cut: tuple[slice, slice]  # part of the picture that is used, rows and columns
    place: tuple[slice, slice]  # its place in the output
    borders: bool  # the output has black borders


def _plan(width: int, height: int, aspect: float, upright: _Orientation, size: tuple[int, int], fit: str) -> _Plan:
    """Plan for a picture whose pixels are `aspect` times as wide as high."""
    turns = upright.turns
    rows, columns = size
    shown_width, shown_height = (width * aspect, float(height)) if turns % 2 == 0 else (float(height), width * aspect)
    scaled_columns, scaled_rows = columns, rows
    if fit != "stretch":
        ratios = columns / shown_width, rows / shown_height
        scale = min(ratios) if fit == "letterbox" else max(ratios)
        scaled_columns, scaled_rows = max(1, round(shown_width * scale)), max(1, round(shown_height * scale))
    cut_rows, place_rows = _centred(scaled_rows, rows)
    cut_columns, place_columns = _centred(scaled_columns, columns)
    scaled = (scaled_columns, scaled_rows) if turns % 2 == 0 else (scaled_rows, scaled_columns)
    borders = scaled_rows < rows or scaled_columns < columns
    return _Plan(*scaled, upright, (cut_rows, cut_columns), (place_rows, place_columns), borders)


def _centred(length: int, room: int) -> tuple[slice, slice]:
    """Return the middle part of `length` that fits into `room`, and its place in the middle of `room`."""
    used = min(length, room)
    cut, place = (length - used) // 2, (room - used) // 2
    return slice(cut, cut + used), slice(place, place + used)


class _Converter:
    """Base of converters, which copies planes `(H, W)` or pixels `(H, W, 3)` of uint8 into the output."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self._scratch: Any = None
        self._last: tuple[tuple[int, int, _Orientation], _Plan] | None = None

    def _planned(self, width: int, height: int, aspect: float = 1.0, upright: _Orientation = _UPRIGHT) -> _Plan:
        shape = width, height, upright
        if self._last is None or self._last[0] != shape:
            if self.picture.size is None:  # take the first picture's size
                size = (height, width) if upright.turns % 2 == 0 else (width, height)
                self.picture = picture_with(self.picture, size=size)
            assert self.picture.size is not None
            self._last = shape, _plan(width, height, aspect, upright, self.picture.size, self.picture.fit)
        return self._last[1]

    def _put(self, planes: list[Any], plan: _Plan, out: Any) -> None:
        picture, whole = self.picture, self.picture.dtype == "uint8"
        if plan.upright.mirrored:
            planes = [plane[:, ::-1] for plane in planes]
        if plan.upright.turns:
            planes = [np.rot90(plane, plan.upright.turns) for plane in planes]
        planes = [plane[plan.cut] for plane in planes]
        if plan.borders:
            out[...] = 0
        rows, columns = plan.place
        if len(planes) == 1 and planes[0].ndim == 3:  # pixels (H, W, 3)
            place = out[:, rows, columns].transpose(1, 2, 0) if picture.layout == "CHW" else out[rows, columns]
            place = place[None]
        else:
            place = out[:, rows, columns] if picture.layout == "CHW" else out[rows, columns].transpose(2, 0, 1)
        if picture.layout == "HWC" and len(planes) == 3 and (pack := _packer()) is not None:  # faster than by planes
            pixels = out[rows, columns]
            straight = whole and pixels.flags.c_contiguous
            packed = pack(planes, pixels if straight else self._scratch)
            if straight:
                return
            self._scratch, planes, place = packed, [packed], pixels[None]
        for channel, plane in enumerate(planes):
            if whole:
                place[channel] = plane
            else:
                np.multiply(plane, _UNIT, out=place[channel])


@functools.cache
def _packer() -> Callable[[list[Any], Any], Any] | None:
    """Return OpenCV's function `merge` from planes to pixels, or None without OpenCV."""
    try:
        return import_opencv("").merge  # type: ignore[no-any-return]
    except ImportError:
        return None


class AvConverter(_Converter):
    """Converter of PyAV's frames. Each stream has its own, because it keeps the scaler's tables."""

    def __init__(self, picture: Picture, pixel_aspect: float = 1.0) -> None:
        from av.video.reformatter import VideoReformatter

        from stream_dataloader.streams._media.container import ACCURATE_BILINEAR

        super().__init__(picture)
        self._reformatter = VideoReformatter()
        self._pixel_aspect = pixel_aspect
        self._gray = picture.color == "gray"
        # When it shrinks, bilinear averages all pixels that one output pixel covers.
        self._options: dict[str, Any] = {"interpolation": ACCURATE_BILINEAR, "threads": 1}
        self._format = "gray" if self._gray else "gbrp"
        if picture.conversion == "swscale":
            self._options = {"threads": 1}
            self._format = "gray" if self._gray else "rgb24"
        self._order = (2, 0, 1) if self._format == "gbrp" else (0,)  # R, G, B among the planes G, B, R

    def empty(self, frame: av.VideoFrame) -> Any:
        self._planned(frame.width, frame.height, self._pixel_aspect, _orientation(frame))
        return self.picture.empty()

    def write(self, frame: av.VideoFrame, out: Any) -> None:
        plan = self._planned(frame.width, frame.height, self._pixel_aspect, _orientation(frame))
        options = self._options
        if self._gray and self.picture.conversion == "accurate":
            options = {**options, **_LUMA, "src_color_range": frame.color_range}
        converted = self._reformatter.reformat(frame, plan.width, plan.height, self._format, **options)
        planes: Any = converted.planes
        views = []
        for index in self._order:
            plane = planes[index]
            view = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)  # rows are padded
            if self._format == "rgb24":
                views.append(view[: plan.height, : 3 * plan.width].reshape(plan.height, plan.width, 3))
            else:
                views.append(view[: plan.height, : plan.width])
        self._put(views, plan, out)


class ArrayConverter(_Converter):
    """Converter of OpenCV's pictures: `(H, W)`, `(H, W, 3)` BGR or `(H, W, 4)` BGRA, uint8 or uint16."""

    def empty(self, image: Any) -> Any:
        self._planned(image.shape[1], image.shape[0])
        return self.picture.empty()

    def write(self, image: Any, out: Any) -> None:
        import cv2

        height, width = image.shape[:2]
        plan = self._planned(width, height)
        if image.dtype == np.uint16 and not self.picture.deep:  # keep the most significant bits
            image = (image >> 8).astype(np.uint8)
        if image.ndim == 3 and image.shape[2] == 4:
            image = image[..., :3]
        if self.picture.color == "gray" and image.ndim == 3:
            image = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
        if (plan.width, plan.height) != (width, height):
            smaller = plan.width < width or plan.height < height
            method = cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
            image = cv2.resize(image, (plan.width, plan.height), interpolation=method)
        if self.picture.color == "gray":
            planes = [image]
        elif image.ndim == 2:
            planes = [image, image, image]
        else:
            planes = list(cv2.split(image))[::-1]
        self._put(planes, plan, out)
