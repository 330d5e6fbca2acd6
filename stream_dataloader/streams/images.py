"""Folders of numbered images, each folder read as one video (OpenCV).

Guarantee: images are read in the order of their numbers. A damaged image raises an error that names it.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stream_dataloader._engine.hints import hinted
from stream_dataloader.streams._media.items import PictureItems
from stream_dataloader.streams._media.listing import entries_in, is_hidden
from stream_dataloader.streams._media.opencv import check_opencv, decoded_image, import_opencv
from stream_dataloader.streams._media.picture import ArrayConverter, PictureOptions
from stream_dataloader.streams._media.section import DIGITS, check_kind, section_of
from stream_dataloader.streams.cache.gate import Files, Gate, check_files

__all__ = ["SUFFIXES", "ImageFolderStream"]

#: Suffixes of images, if there is no pattern.
SUFFIXES = frozenset(
    ".avif .bmp .dib .gif .jp2 .jpe .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()  # noqa: SIM905
)

_NUMBER_FORMAT = re.compile(r"%(?:0?([1-9]\d*))?d")


@hinted
@dataclass(frozen=True, kw_only=True)
class ImageFolderStream(PictureOptions):
    """Factory of streams from folders of images: each image is an item.

    A source is a folder, or a folder and a pattern for the names in it: `"shots/left_*.png"` or
    `"shots/%05d.jpg"`. A source `(source, start, stop)` has images `[start, stop)` of it. Names are sorted with
    numbers as numbers. Images of 16 bits a channel are scaled to 8, and transparency is dropped.

    Attributes:
        size: `(height, width)` in pixels; None keeps the size of the source's first image.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"`, or `"gray"`: one channel.
        dtype: `"uint8"`, 0 to 255, or `"float32"`, 0 to 1.
        fit: `"stretch"`, `"letterbox"` or `"crop"`; see `PictureOptions`.
        pattern: Pattern of the names of images, with `*`, `?` and `[...]`; None: by suffix.
        frame_step: Take every n-th image, from the source's first on.
        gaps: `"allow"`, or `"raise"` an error if a number is missing in the images' names.
        on_corrupt: `"raise"`, or `"keep"`: the image before takes the place of a damaged one.
        upright: Turn images as their EXIF data say.
        limits: Largest number of pixels of an image; see `Limits`. None: the defaults.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.

    Raises:
        ImportError: OpenCV is not installed.
        ValueError: An option has an invalid value.

    Example:
        >>> import tempfile, cv2, numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> for number in range(12):
        ...     _ = cv2.imwrite(f"{folder}/shot{number}.png", np.full((4, 6, 3), number, np.uint8))
        >>> open_stream = ImageFolderStream()
        >>> [(image.shape, int(image[0, 0, 0])) for image in open_stream((folder, 9, None))]
        [((3, 4, 6), 9), ((3, 4, 6), 10), ((3, 4, 6), 11)]
        >>> open_stream.length(folder)
        12
    """

    open_early: ClassVar[bool] = True  # streams share nothing

    pattern: str | None = None
    frame_step: int = 1
    gaps: Literal["allow", "raise"] = "allow"
    on_corrupt: Literal["raise", "keep"] = "raise"
    upright: bool = True
    files: Files = "inside"

    def __post_init__(self) -> None:
        check_opencv("ImageFolderStream")
        super().__post_init__()
        check_files(self.files)
        if self.frame_step < 1:
            raise ValueError(f"frame_step is {self.frame_step}; give 1 or more")
        if self.pattern is not None and (not self.pattern or os.sep in self.pattern):
            raise ValueError(f"pattern is {self.pattern!r}; give one for names, like '*.png'")

    def __call__(self, source: Any, *, start: int = 0) -> PictureItems:
        """Open one source at item `start`, counted from the source's first item.

        Raises:
            ValueError: The folder has fewer images than requested; or one is missing, with `gaps="raise"`.
            StoreError: A link leads out of the folder.
            OSError: The folder does not exist, is a file, or cannot be read.
        """
        import_opencv("ImageFolderStream")
        paths = self._paths(source)
        if not 0 <= start <= len(paths):
            raise ValueError(f"start is {start}, and {section_of(source).path} has {len(paths)} items")
        converter = ArrayConverter(self.picture)
        return PictureItems(self._images(paths, start, converter), converter)

    def _images(self, paths: list[str], start: int, converter: ArrayConverter) -> Iterator[tuple[Any, None]]:
        """Yield the decoded images `paths[start:]`."""
        if self.size is None and 0 < start < len(paths):
            converter.empty(self._read(paths, 0))  # the source's first image sets the size
        for position in range(start, len(paths)):
            yield self._read(paths, position), None

    def _read(self, paths: list[str], position: int) -> Any:
        for kept in range(position, -1, -1):
            path = paths[kept]
            try:
                check_kind(path, os.stat(path).st_mode)
                with open(path, "rb") as file:
                    return decoded_image(
                        file.read(), path, gray=self.color == "gray", upright=self.upright, limits=self.limits
                    )
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{path} was there when its folder was listed, and is gone") from error
            except ValueError as error:
                if self.on_corrupt == "raise":
                    raise
                if not kept:
                    raise ValueError(f"{error}; and there is no image before it to be kept") from error
        raise AssertionError(f"position {position}")

    def length(self, source: Any) -> int:
        """Return the number of items, by listing the folder."""
        return len(self._paths(source))

    def _paths(self, source: Any) -> list[str]:
        path, start, stop = section_of(source)
        paths = _find(os.fspath(path), self.pattern, self.files)
        if self.gaps == "raise":
            _check_numbers(paths)
        stop = len(paths) if stop is None else stop
        if stop > len(paths) or start > stop:
            raise ValueError(f"images {start} to {stop} were asked for, and {path} has {len(paths)}")
        return paths[start : stop : self.frame_step]


def _find(path: str, pattern: str | None, files: Files) -> list[str]:
    """Return the paths of the images that a source names, in order."""
    folder, name, matches = path, pattern or "", _matcher(pattern)
    what = f"matches {pattern!r}" if pattern else "has an image's suffix"
    if not os.path.isdir(path):
        head, name = os.path.split(path)
        if os.path.lexists(path):
            raise NotADirectoryError(f"{path} is a file; give the folder that it is in")
        if not any(sign in name for sign in "*?[%"):
            raise FileNotFoundError(f"there is no folder {path}")
        folder, matches, what = head or os.curdir, _matcher(name), f"matches {name!r}"
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no folder {folder}")
    gate, found = Gate(folder, files), []
    for entry in entries_in(folder, hidden=is_hidden(name)):
        if matches(entry.name):
            if entry.is_symlink():
                gate.check_link(entry.path)
            if not entry.is_dir():
                found.append(entry.path)
    if not found:
        raise ValueError(f"{folder} has no images: no name in it {what}")
    return found


def _matcher(pattern: str | None) -> Any:
    if pattern is None:
        return lambda name: os.path.splitext(name)[1].lower() in SUFFIXES
    if (number := _NUMBER_FORMAT.search(pattern)) is None:
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    digits = f"[0-9]{{{number[1] or 1},}}"
    rest = [re.escape(part.replace("%%", "%")) for part in (pattern[: number.start()], pattern[number.end() :])]
    return re.compile(digits.join(rest)).fullmatch


def _check_numbers(paths: list[str]) -> None:
    """Check that the last number in the names increases by one from image to image."""
    before = None
    for path in paths:
        found = DIGITS.findall(os.path.splitext(os.path.basename(path))[0])
        if not found:
            raise ValueError(f"{path} has no number, and gaps='raise' is to check it")
        if before is not None and int(found[-1]) != before + 1:
            raise ValueError(f"{before + 1} is missing before {path}; gaps='allow' reads on all the same")
        before = int(found[-1])
