"""The encodings of columns, by their names in the index.

Guarantee: a name stands for the encoding that mosaicml-streaming 0.13 has of it, or is an error that lists those that
there are.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

import numpy as np

from stream_dataloader.errors import shorten
from stream_dataloader.stores.mds.encodings import (
    ARRAY_DTYPES,
    ArrayEncoding,
    BytesEncoding,
    Encoding,
    JsonEncoding,
    ListEncoding,
    PickleEncoding,
    TextEncoding,
)
from stream_dataloader.stores.mds.pictures import PictureEncoding

__all__ = ["encoding_of"]

_NUMBERS = tuple(ARRAY_DTYPES.values())
_PICTURES = ("jpeg", "png", "pil")
_OTHERS: dict[str, Callable[[], Encoding]] = {
    "bytes": BytesEncoding,
    "str": lambda: TextEncoding(str),
    "int": lambda: ArrayEncoding("int64", (), int),
    "str_int": lambda: TextEncoding(int, np.integer),
    "str_float": lambda: TextEncoding(float, np.floating),
    "str_decimal": lambda: TextEncoding(decimal.Decimal),
    "json": JsonEncoding,
    "pkl": PickleEncoding,
}


def encoding_of(name: Any, *, allow_pickle: bool = False) -> Encoding:
    """The encoding of a name.

    Raises:
        ValueError: There is none of that name, or it is `pkl`, and pickles are not allowed.
    """
    if not isinstance(name, str):
        raise ValueError(f"{shorten(name)} is no encoding")
    if name == "pkl" and not allow_pickle:
        raise ValueError(
            "'pkl' is refused: unpickling runs whatever code the file holds; with allow_pickle=True it is read all the "
            "same, if you trust who wrote it"
        )
    if name in _OTHERS:
        return _OTHERS[name]()
    if name in _NUMBERS:
        return ArrayEncoding(name, ())
    if name.partition(":")[0] == "ndarray":
        return ArrayEncoding.named(name.partition(":")[2])
    if name in _PICTURES:
        return PictureEncoding(name)
    if name in ("jpeg_array", "jpegarray"):
        return ListEncoding(PictureEncoding("jpeg"), 0)
    if name.startswith("list[") and name[5:-1] in _PICTURES and name.endswith("]"):
        return ListEncoding(PictureEncoding(name[5:-1]), 4)
    known = [*_OTHERS, *_NUMBERS, "ndarray[:dtype[:shape]]", *_PICTURES]
    raise ValueError(
        f"there is no encoding {name!r}; there are {', '.join(known)}, list[jpeg], list[png], list[pil] and jpeg_array"
    )
