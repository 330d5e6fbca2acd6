"""Encoded images among a store's data, decoded to one shape.

Guarantee: one of another size or depth than the batch has is an error.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.streams._media.opencv import check_opencv, decoded_image, import_opencv
from stream_dataloader.streams._media.picture import ArrayConverter, Picture

__all__ = ["PictureRows", "Pictures"]


class Pictures:
    """Decodes a stream's images, with the options of `ImageFolderStream`.

    With `swapped` gray ones keep their one channel; if it is True, blue and red change places.
    """

    def __init__(self, picture: Picture, user: str, *, swapped: bool | None = None) -> None:
        check_opencv(user)
        self._picture, self._swapped = picture, swapped

    def item(self, data: bytes, name: str, out: Any = None) -> Any:
        """One image, as an array of its own, or written to `out`."""
        picture, flags = self._picture, None
        if self._swapped is not None:
            cv2 = import_opencv("")
            flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH
        is_gray = picture.color == "gray"
        try:
            image = decoded_image(data, name, gray=is_gray, deep=True, upright=picture.upright, flags=flags)
        except ValueError as error:
            raise StoreError(str(error)) from error.__cause__
        if flags is not None and image.ndim == 2:
            picture = dataclasses.replace(picture, color="gray")
        elif self._swapped:
            image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        # One an image, as it would rescale to the size of its first.
        converter = ArrayConverter(dataclasses.replace(picture, deep=image.dtype == np.uint16))
        own = converter.empty(image)
        if out is None:
            out = own
        elif (own.dtype, own.shape) != (out.dtype, out.shape):
            what = f"{name} is an image of {own.dtype} {own.shape}, and those before are {out.dtype} {out.shape}"
            raise StoreError(f"{what}; give size=(height, width) to rescale all")
        converter.write(image, out)
        return out


class PictureRows:
    """Rows that are encoded images, which zeros may follow: a `tables.Table` of what they show."""

    def __init__(self, rows: Any, pictures: Pictures, name: str) -> None:
        self._rows, self._pictures, self._name = rows, pictures, name

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def _first(self) -> Any:
        return self.row(0)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """That of the first."""
        return tuple(self._first.shape)

    @property
    def dtype(self) -> Any:
        """That of the first."""
        return self._first.dtype

    def row(self, index: int, out: Any = None) -> Any:
        name = f"{self._name}, row {index}"
        with damage_named(name):
            return self._pictures.item(bytes(self._rows[index]), name, out)

    def read(self, start: int, out: Any) -> None:
        for row, place in enumerate(out, start):
            self.row(row, place)

    def close(self) -> None:
        self._rows = ()
