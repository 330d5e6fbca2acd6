"""Many small files as a few streams, to be packed.

Guarantee: each file is in exactly one stream, and the order is a pure function of the list, the number of streams and
the seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["FileChunks", "files_as_streams"]


def files_as_streams(
    files: str | os.PathLike[str] | Sequence[str],
    streams: int,
    *,
    process: Callable[[bytes, str], Any],
    shuffle: int | None = None,
) -> tuple[range, FileChunks]:
    """Make a few streams of many small files: sources and factory for `stores.pack`, or for `StreamDataset`.

    A file is a time step. A store of them is read in order, at the speed of a few large files, and not file by file.
    What is read together in training is shuffled twice: here, once and for all, and each epoch among streams, so give
    several times as many streams as there are lanes. ::

        pair = files_as_streams("train.txt", 256, process=decode, shuffle=0)
        stores.pack(pair, "train.store", format="lmdb", num_workers=8)

    Args:
        files: A text file with a path a line, UTF-8, empty lines left out, relative ones to its own folder; or paths.
        streams: How many streams. Their lengths differ by one at most.
        process: Called with a file's bytes and its path as it is in the list; returns an item. All items are to be
            alike: resize images, encode labels as numbers. It is sent to workers.
        shuffle: Seed of the files' order; None keeps that of the list.

    Returns:
        The numbers of streams, and the factory that opens them.

    Raises:
        FileNotFoundError: There is no list file.
        ValueError: There are fewer files than streams.
    """
    factory = FileChunks(files, streams, process, shuffle)
    count = len(factory.paths)
    if not 1 <= streams <= max(1, count):
        raise ValueError(f"streams is {streams}; use 1 to {count}, as there are {count} files")
    return range(streams), factory


class FileChunks:
    """The factory of `files_as_streams`. It is sent to workers without the list, if that is in a file."""

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str],
        streams: int,
        process: Callable[[bytes, str], Any],
        shuffle: int | None,
    ) -> None:
        self._files = os.path.abspath(files) if isinstance(files, (str, os.PathLike)) else tuple(files)
        self._streams = streams
        self._process = process
        self._shuffle = shuffle
        self._paths: list[str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_paths": None}

    @property
    def paths(self) -> list[str]:
        """All files, in the order in which they are in the streams, end to end."""
        if self._paths is None:
            paths = list(self._files) if isinstance(self._files, tuple) else self._listed(self._files)
            if self._shuffle is not None:
                order = np.random.default_rng(self._shuffle).permutation(len(paths))
                paths = [paths[i] for i in order]
            self._paths = paths
        return self._paths

    @staticmethod
    def _listed(path: str) -> list[str]:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return [line for line in file.read().splitlines() if line.strip()]

    def length(self, stream: int) -> int:
        """How many files a stream has."""
        return len(self._chunk(stream))

    def _chunk(self, stream: int) -> range:
        count = len(self.paths)
        return range(stream * count // self._streams, (stream + 1) * count // self._streams)

    def __call__(self, source: int, *, start: int = 0) -> Iterator[Any]:
        """One stream's items.

        Raises:
            ValueError: A file cannot be processed; names it.
            OSError: It cannot be read.
        """
        folder = "" if isinstance(self._files, tuple) else os.path.dirname(self._files)
        for place in self._chunk(source)[start:]:
            path = self.paths[place]
            with open(os.path.join(folder, path), "rb") as file:
                content = file.read()
            try:
                yield self._process(content, path)
            except Exception as error:
                raise ValueError(f"{path}: process= raised {type(error).__name__}: {error}") from error
