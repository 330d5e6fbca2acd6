"""Media in a folder or a list: which files there are, of what kind, and the factory that opens them.

Guarantee: files come in the order of their names, numbers as numbers, and none is left out without a word.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stream_dataloader import streams
from stream_dataloader.cli.option_values import with_options
from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams.images import SUFFIXES as IMAGE_SUFFIXES

_VIDEO_SUFFIXES = (
    ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)  # fmt: skip
_AUDIO_SUFFIXES = (".aac", ".aif", ".aiff", ".flac", ".m4a", ".mp3", ".oga", ".ogg", ".opus", ".wav", ".wma")
_LIST_SUFFIXES = (".txt", ".lst", ".list")


class _Kind(NamedTuple):
    suffixes: Iterable[str]
    factory: str  # its name in `streams`
    defaults: Mapping[str, Any] = {}
    sized: bool = False  # takes a size


#: What can be read, by its name.
KINDS: dict[str, _Kind] = {
    "video": _Kind(_VIDEO_SUFFIXES, "VideoStream", sized=True),
    "audio": _Kind(_AUDIO_SUFFIXES, "AudioStream", {"window": 1024}),
    "text": _Kind((".txt", ".md", ".gz", ".zst"), "TextStream"),
    "array": _Kind((".npy", ".h5", ".hdf5"), "ArrayStream"),
    "images": _Kind(sorted(IMAGE_SUFFIXES), "ImageFolderStream", sized=True),
}


def factory_of(kind: str, size: tuple[int, int] | None, options: Mapping[str, Any]) -> Any:
    """What opens media of a kind; `size` is width and height.

    Raises:
        TypeError: The kind has no such option.
        ValueError: It has, but not of that value, or it has no size.
    """
    _, factory, defaults, sized = KINDS[kind]
    if size is None:
        return with_options(options, getattr(streams, factory), **defaults)
    if not sized:
        raise ValueError(f"--size is for videos and images, and this is {kind}; leave it out")
    return with_options(options, getattr(streams, factory), **defaults, size=size[::-1])


def find_media(path: Path, kind: str | None) -> tuple[str, dict[str, str]]:
    """The media in a folder and those below it, in a list of paths, one a line, or one file.

    Args:
        path: The folder, the list, or the file.
        kind: One of `KINDS`; None finds it out by suffixes.

    Returns:
        The kind, and what each path, a folder's if it is of images, is called: by its place below the folder, or as the
        list has it.

    Raises:
        FileNotFoundError: There is nothing at the path, or at one in the list.
        ValueError: There is no medium, or there are several kinds.
    """
    if path.is_dir():
        files = sorted(
            (found for found in path.rglob("*") if found.is_file()), key=lambda file: natural_order(str(file))
        )
        names = [str(found.relative_to(path)) for found in files]
    elif path.exists() and kind != "text" and path.suffix.lower() in _LIST_SUFFIXES:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        names = [line for line in lines if line and not line.startswith("#")]
        files = [path.parent / name for name in names]
        if missing := [file for file in files if not file.exists()]:
            raise FileNotFoundError(f"{path} lists {missing[0]}, which does not exist, and {len(missing) - 1} more")
    elif path.exists():
        files, names = [path], [path.name]
    else:
        raise FileNotFoundError(f"{path} does not exist; give a folder of media, a list of paths, or a store")
    kind = kind or _kind_of(path, files)
    suffixes = tuple(KINDS[kind].suffixes)
    found: dict[str, str] = {}
    for file, name in zip(files, names, strict=True):
        if kind == "images" and file.is_dir():
            found[str(file)] = name
        elif not file.name.lower().endswith(suffixes):
            continue
        elif kind == "images":
            found[str(file.parent)] = os.path.dirname(name) or path.name
        else:
            found[str(file)] = name
    if not found:
        raise ValueError(f"{path} has no {kind} in it ({' '.join(suffixes)})")
    return kind, found


def _kind_of(path: Path, files: Sequence[Path]) -> str:
    of_suffix = {suffix: name for name, kind in KINDS.items() for suffix in kind.suffixes}
    if files and all(file.is_dir() for file in files):  # a list of folders
        return "images"
    found = Counter(of_suffix[suffix] for file in files if (suffix := file.suffix.lower()) in of_suffix)
    if not found:
        raise ValueError(f"{path} has no media in it; say what it is by --kind, one of {', '.join(KINDS)}")
    if len(found) > 1:
        told = ", ".join(f"{count} of {name}" for name, count in found.most_common())
        raise ValueError(f"{path} has files of several kinds ({told}); choose one by --kind")
    return next(iter(found))
