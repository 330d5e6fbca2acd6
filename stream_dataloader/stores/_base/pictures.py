"""Encoded images among a store's data, decoded to one shape.

Guarantee: images of 16 bits a channel keep them, as uint16. An image of another size or depth than the batch has is an
error, or rescaled where a size was asked for. Images are turned as their EXIF says, unless that is switched off.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.streams._media.opencv import check_opencv
from stream_dataloader.streams._media.picture import ArrayConverter, Picture
from stream_dataloader.streams._media.still import decoded_image

__all__ = ["Pictures"]


class Pictures:
    """Decodes a stream's images, with the options of `ImageFolderStream`; used by one thread at a time."""

    def __init__(self, picture: Picture, user: str) -> None:
        check_opencv(user)
        self._picture = picture

    def item(self, data: bytes, name: str) -> Any:
        """One image, as an array of its own.

        Raises:
            StoreError: It cannot be decoded.
        """
        image, converter = self._decoded(data, name)
        out = converter.empty(image)
        converter.write(image, out)
        return out

    def write(self, data: bytes, name: str, out: Any) -> None:
        """Decode an image into `out`, of an item's shape.

        Raises:
            StoreError: It cannot be decoded, or has another size or depth.
        """
        image, converter = self._decoded(data, name)
        if (image.dtype == np.uint16) != (out.dtype == np.uint16):
            raise StoreError(f"{name} is an image of {image.dtype}, and those before it are of {out.dtype}")
        if self._picture.size is None:
            sides = out.shape[1:] if self._picture.layout == "CHW" else out.shape[:2]
            if image.shape[:2] != tuple(sides):
                raise StoreError(
                    f"{name} is an image of {image.shape[0]} x {image.shape[1]} pixels, and those before it are of "
                    f"{sides[0]} x {sides[1]}; give size=(height, width), which all are rescaled to"
                )
        converter.write(image, out)

    def _decoded(self, data: bytes, name: str) -> tuple[Any, ArrayConverter]:
        """An image, and what converts it: one an image, as it would rescale to the size of its first."""
        picture = self._picture
        try:
            image = decoded_image(data, name, gray=picture.color == "gray", deep=True, upright=picture.upright)
        except ValueError as error:
            raise StoreError(str(error)) from error.__cause__
        return image, ArrayConverter(dataclasses.replace(picture, deep=image.dtype == np.uint16))
