"""Encoded images among a store's data, decoded to one shape.

Guarantee: an image of another size than the batch has is an error, or rescaled where a size was asked for.
"""

from __future__ import annotations

from typing import Any

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
        self._converter = ArrayConverter(picture)

    def item(self, data: bytes, name: str) -> Any:
        """One image, as an array of its own.

        Raises:
            StoreError: It cannot be decoded.
        """
        image = self._decoded(data, name)
        out = self._converter.empty(image)
        self._converter.write(image, out)
        return out

    def write(self, data: bytes, name: str, out: Any) -> None:
        """Decode an image into `out`, of an item's shape.

        Raises:
            StoreError: It cannot be decoded, or has another size.
        """
        image = self._decoded(data, name)
        if self._picture.size is None:
            sides = out.shape[1:] if self._picture.layout == "CHW" else out.shape[:2]
            if image.shape[:2] != tuple(sides):
                raise StoreError(
                    f"{name} is an image of {image.shape[0]} x {image.shape[1]} pixels, and those before it are of "
                    f"{sides[0]} x {sides[1]}; give size=(height, width), which all are rescaled to"
                )
        self._converter.write(image, out)

    def _decoded(self, data: bytes, name: str) -> Any:
        try:
            image = decoded_image(data, name, gray=self._picture.color == "gray")
        except ValueError as error:
            raise StoreError(str(error)) from error.__cause__
        if self._picture.size is None:  # the converter would rescale to the size of its first
            self._converter = ArrayConverter(self._picture)
        return image
