"""Decodes members of tars by their extensions, as the package webdataset does (1.0.2, `autodecode`), with less trust.

==========================================  ==========================================================================
jpg jpeg png webp bmp ppm pgm tif tiff      an image, by OpenCV: `(3, H, W)` RGB, uint8 or uint16; see the options
npy                                         an array of numbers
cls cls2 class count index inx id int       a whole number, as text: int64
txt text transcript                         a string
json jsn                                    what it says: numbers and strings, in dicts and lists
pth pkl pickle                              refused unless allowed: they run code when they are read
anything else                               bytes
==========================================  ==========================================================================

Of `depth.png`, the last part counts.
"""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.pictures import Pictures
from stream_dataloader.stores._base.values import put_row
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams.array.tables import read_header

__all__ = ["Decoder"]

_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff"})
_TEXTS = frozenset({"txt", "text", "transcript"})
_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id", "int"})
_JSON = frozenset({"json", "jsn"})
_PICKLED = frozenset({"pkl", "pickle", "pth"})


class Decoder:
    """Decodes members; used by one thread at a time."""

    def __init__(self, picture: Picture, *, decode: bool, allow_pickle: bool) -> None:
        self._decode = decode
        self._picture = picture
        self._allow_pickle = allow_pickle
        self._pictures: Pictures | None = None

    def item(self, extension: str, data: bytes, name: str) -> Any:
        """What a member holds."""
        kind = extension.rpartition(".")[2] if self._decode else ""
        if kind in _IMAGES:
            return self._images().item(data, name)
        try:
            if kind == "npy":
                return _array(data, name)
            if kind in _TEXTS:
                return data.decode("utf-8")
            if kind in _NUMBERS:
                return np.int64(int(data))
            if kind in _JSON:
                return json.loads(data)
        except (ValueError, RecursionError, OverflowError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{name} cannot be decoded: {error}") from None
        return self._unpickled(kind, data, name) if kind in _PICKLED else data

    def write(self, extension: str, data: bytes, name: str, out: Any, row: int) -> None:
        """Decode a member into a row of a batch."""
        if self._decode and isinstance(out, np.ndarray) and extension.rpartition(".")[2] in _IMAGES:
            self._images().write(data, name, out[row])
        else:
            put_row(self.item(extension, data, name), out, row, name)

    def _images(self) -> Pictures:
        if self._pictures is None:
            self._pictures = Pictures(self._picture, "reading images of a WebDataset")
        return self._pictures

    def _unpickled(self, kind: str, data: bytes, name: str) -> Any:
        if not self._allow_pickle:
            raise StoreError(
                f"{name} is pickled, and reading it may run any code; leave it out by columns=, or give "
                "allow_pickle=True if you trust who made it"
            )
        try:
            if kind == "pth":
                import torch

                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            return pickle.loads(data)
        except Exception as error:  # a pickle may raise anything
            raise StoreError(f"{name} cannot be unpickled: {type(error).__name__}: {error}") from error


def _array(data: bytes, name: str) -> Any:
    """The array of a `.npy` file, whose header is compared with the bytes there are before anything is allocated."""
    file = io.BytesIO(data)
    header = read_header(file, name)
    if header.dtype.hasobject or header.dtype.kind not in "biufc":
        raise StoreError(f"{name} is of dtype {header.dtype}, and arrays are of numbers; leave it out by columns=")
    if header.file_bytes != len(data):
        raise StoreError(f"{name} is damaged: {len(data):,} bytes of {header.file_bytes:,}; write it anew")
    flat = np.frombuffer(data, header.dtype, offset=header.offset)
    order: Any = "F" if header.fortran_order else "C"
    return np.array(flat.reshape(header.shape, order=order), header.dtype.newbyteorder("="), order="C")[()]
