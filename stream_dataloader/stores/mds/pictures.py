"""Pictures as bytes (JPEG, PNG, and Pillow's raw ones) without Pillow; and all encodings by their names.

Source: `streaming/base/format/mds/encodings.py` of mosaicml-streaming 0.13, and Pillow 13's raw modes. Raw pictures
are `[width: 4 bytes] [height: 4 bytes] [length of the mode: 4 bytes] mode, rows`.

Guarantee: a picture is `(H, W)` if it is grey, `(H, W, 3)` RGB or `(H, W, 4)` RGBA, uint8, or uint16 where the file has
16 bits. PNG and raw ones are what Pillow makes of them, but that colours of a PNG's palette are looked up. JPEG may
differ by a few shades from decoder to decoder, and is turned as its EXIF says unless that is switched off.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stream_dataloader.errors import shorten
from stream_dataloader.stores.mds.encodings import ARRAY_DTYPES, PLAIN, ArrayEncoding, Encoding, ListEncoding
from stream_dataloader.streams._media.opencv import import_opencv
from stream_dataloader.streams._media.still import decoded_image

__all__ = ["PictureEncoding", "encoding_of"]

_NUMBERS = tuple(ARRAY_DTYPES.values())
_PICTURES = ("jpeg", "png", "pil")

#: Dtype and channels of Pillow's modes.
_MODES: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("L", "P"), ("u1", 1)),
    **dict.fromkeys(("LA", "La", "PA"), ("u1", 2)),
    **dict.fromkeys(("RGB", "YCbCr", "HSV", "LAB"), ("u1", 3)),
    **dict.fromkeys(("RGBA", "RGBX", "RGBa", "CMYK"), ("u1", 4)),
    "I;16": ("<u2", 1),
    "I;16L": ("<u2", 1),
    "I;16B": (">u2", 1),
    "I": ("<i4", 1),
    "F": ("<f4", 1),
}
_MODE_OF_ARRAY = {("|u1", 0): "L", ("|u1", 3): "RGB", ("|u1", 4): "RGBA", ("<u2", 0): "I;16", ("<i4", 0): "I"}
_MODE_OF_ARRAY |= {("<f4", 0): "F"}


class PictureEncoding(Encoding):
    """One picture."""

    def __init__(self, kind: str, upright: bool = True) -> None:
        self._kind = kind
        self._upright = upright

    def decode(self, data: memoryview) -> Any:
        if self._kind == "pil":
            return _raw(data)
        cv2 = import_opencv("a picture of an MDS dataset")
        flags = cv2.IMREAD_UNCHANGED  # which never turns; others leave out transparency, which JPEG has not
        if self._kind == "jpeg" and self._upright:
            flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH
        image = decoded_image(bytes(data), f"a {self._kind}", flags=flags)
        if image.ndim == 3:
            code = cv2.COLOR_BGR2RGB if image.shape[2] == 3 else cv2.COLOR_BGRA2RGBA
            cv2.cvtColor(image, code, dst=image)
        return image

    def encode(self, value: Any) -> bytes:
        if hasattr(value, "tobytes") and hasattr(value, "mode"):  # one of Pillow's
            if self._kind == "pil":
                return _raw_bytes(value.mode, value.width, value.height, value.tobytes())
            value = np.asarray(value)
        array = np.asarray(value)
        kind = (array.dtype.newbyteorder("<").str, array.shape[2] if array.ndim == 3 else 0)
        if array.ndim not in (2, 3) or kind not in _MODE_OF_ARRAY or not array.size:
            raise ValueError(
                f"a {array.dtype} {array.shape} where a picture is to be written: uint8 (H, W), (H, W, 3) or (H, W, 4)"
            )
        if self._kind == "pil":
            return _raw_bytes(_MODE_OF_ARRAY[kind], array.shape[1], array.shape[0], array.astype(kind[0]).tobytes())
        cv2 = import_opencv("a picture of an MDS dataset")
        if array.ndim == 3:
            array = cv2.cvtColor(array, cv2.COLOR_RGB2BGR if array.shape[2] == 3 else cv2.COLOR_RGBA2BGRA)
        done, data = cv2.imencode(".jpg" if self._kind == "jpeg" else ".png", array)
        if not done:
            raise ValueError(f"a {array.dtype} {array.shape} that cannot be written as {self._kind}")
        return bytes(data)


def _raw_bytes(mode: str, width: int, height: int, rows: bytes) -> bytes:
    return np.array([width, height, len(mode)], "<u4").tobytes() + mode.encode() + rows


def _raw(data: memoryview) -> Any:
    """One of Pillow's raw pictures."""
    width, height, length = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4, 8))
    mode, rows = bytes(data[12 : 12 + length]).decode("ascii", "backslashreplace"), data[12 + length :]
    if mode == "1":  # a bit a pixel, rows end with a byte
        bits = np.frombuffer(rows, np.uint8).reshape(height, -(-width // 8))
        return np.unpackbits(bits, axis=1, count=width).astype(bool)
    if mode not in _MODES:
        raise ValueError(f"a picture of mode {mode[:20]!r}; {', '.join(_MODES)} are read")
    dtype, channels = _MODES[mode]
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.frombuffer(rows, dtype).reshape(shape).astype(np.dtype(dtype).newbyteorder("="))


def encoding_of(name: str, *, allow_pickle: bool = False, upright: bool = True) -> Encoding:
    """The encoding of a name: that which mosaicml-streaming 0.13 has of it."""
    if name == "pkl" and not allow_pickle:
        raise ValueError(
            "'pkl' is refused: unpickling runs whatever code the file holds; with allow_pickle=True it is read all the "
            "same, if you trust who wrote it"
        )
    if name in PLAIN:
        return PLAIN[name]
    if name == "int":
        return ArrayEncoding("int64", (), int)
    if name in _NUMBERS:
        return ArrayEncoding(name, ())
    if name.partition(":")[0] == "ndarray":
        return ArrayEncoding.named(name.partition(":")[2])
    if name in _PICTURES:
        return PictureEncoding(name, upright)
    if name in ("jpeg_array", "jpegarray"):
        return ListEncoding(PictureEncoding("jpeg", upright), 0)
    if name.startswith("list[") and name[5:-1] in _PICTURES and name.endswith("]"):
        return ListEncoding(PictureEncoding(name[5:-1], upright), 4)
    known = ["int", *PLAIN, *_NUMBERS, "ndarray[:dtype[:shape]]", *_PICTURES]
    raise ValueError(
        f"there is no encoding {shorten(name)}; there are {', '.join(known)}, list[jpeg], list[png], list[pil] and "
        "jpeg_array"
    )
