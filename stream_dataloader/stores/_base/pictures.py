"""Encoded images among a store's data, decoded to one shape.

Guarantee: one of another size or depth than the batch has is an error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.streams._media.opencv import check_opencv, decoded_image
from stream_dataloader.streams._media.picture import ArrayConverter, Picture

__all__ = ["Pictures"]


class Pictures:
    """Decodes a stream's images, with the options of `ImageFolderStream`."""

    def __init__(self, picture: Picture, user: str) -> None:
        check_opencv(user)
        self._picture = picture

    def item(self, data: bytes, name: str, out: Any = None) -> Any:
        """One image, as an array of its own, or written to `out`.

        Raises:
            StoreError: It cannot be decoded, or has another size or depth than `out`.
        """
        picture = self._picture
        try:
            image = decoded_image(data, name, gray=picture.color == "gray", deep=True, upright=picture.upright)
        except ValueError as error:
            raise StoreError(str(error)) from error.__cause__
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
