"""Reads MDS datasets, of this package and of others, from a folder or from a server.

Source: mosaicml-streaming 0.13, whose `MDSWriter` and `StreamingDataset` the tests compare with.

Guarantee: what is read is what the index says was written: a shard that was fetched or unpacked has the right hashes.
Opening a dataset costs its index and, where streams have to be found first, one pass over one column, made once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from stream_dataloader.stores._base.files import inside, stamp_of
from stream_dataloader.stores._base.options import given_columns
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.structure import classes_of
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, in_folder, read_index
from stream_dataloader.stores.mds.steps import MdsSteps
from stream_dataloader.stores.mds.streams import MdsIndex
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams.cache.file_cache import FileCache, is_url

__all__ = ["MdsStore"]


class MdsStore(Store):
    """An MDS dataset, in a folder or at a URL.

    Items are dicts, with a leaf for each column; of a packed store they are what was packed. Numbers, text and JSON are
    what they were; `jpeg`, `png` and `pil` are arrays `(H, W)`, `(H, W, 3)` RGB or `(H, W, 4)`. Those of `jpeg`
    may differ from another decoder's by a few shades.

    Args:
        path: The folder of index.json, or its URL, of any protocol that fsspec knows.
        stream: What a stream is: `"shard"`, all samples of a shard; `"sample"`, one sample, of which arrays' rows and
            lists' elements are the time steps, and all else is the same in each; or the name of a column: the
            samples that follow each other with one value in it. (`"column:shard"` is a column of that name.) None: what
            was packed as one, of other datasets a shard. Streams of a column are found by one pass over it, which
            fetches the whole dataset if it is remote; what it found is kept in the cache.
        split: The folder below `path` that has the index.json.
        columns: Which to read; None reads all but the one that names streams.
        allow_pickle: Also read columns of encoding `pkl`. Unpickling runs whatever code they hold.
        upright: Turn JPEG as its EXIF says.
        cache: Where remote shards and unpacked ones are kept; None is what the environment says, see `FileCache`.
        predownload: How many more shards of a stream that is read are fetched and unpacked ahead of use.

    Raises:
        FileNotFoundError: There is no such folder, or no index.json at the URL.
        StoreError: The dataset is damaged, or has no such column, or one that is not read.
        ImportError: A package is missing that fetches it; names the extra.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from stream_dataloader.stores import MdsStore, MdsWriter
        >>> folder = tempfile.mkdtemp()
        >>> with MdsWriter(folder, columns={"x": "ndarray:float32:2", "episode": "int"}) as writer:
        ...     for step in range(5):
        ...         writer.write({"x": np.full(2, step, np.float32), "episode": step // 3})
        >>> store = MdsStore(folder, stream="episode")
        >>> [(store.key(number), [item["x"].tolist() for item in store(number)]) for number in store.sources]
        [('0', [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), ('1', [[3.0, 3.0], [4.0, 4.0]])]
    """

    format: ClassVar[str] = "mds"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: str | None = None,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        upright: bool = True,
        cache: FileCache | None = None,
        predownload: int = 1,
    ) -> None:
        if stream is not None and not isinstance(stream, str):
            raise TypeError(f"stream is {stream!r}; give 'shard', 'sample' or the name of a column")
        self._stream = stream
        self._columns = given_columns(columns)
        self._decoding = {"allow_pickle": allow_pickle, "upright": upright}
        self._ahead = whole_number("predownload", predownload, "give a number of shards from 0 on", 0)
        options: dict[str, Any] = {"stream": stream, "split": split, "columns": self._columns, "cache": cache}
        super().__init__(path, **options, **self._decoding, predownload=self._ahead)
        self._cache = FileCache() if cache is None else cache
        if split:
            inside(self.path, split, "split")
        self._folder = in_folder(self.path, split) if split else self.path
        self._classes: dict[str, type] = {}
        self._classes = classes_of(self.index.structure)

    def _state(self) -> str:
        return "" if is_url(self._folder) else stamp_of([in_folder(self._folder, INDEX)])

    def _read_index(self) -> MdsIndex:
        path = in_folder(self._folder, INDEX)
        if not is_url(path) and not os.path.isdir(self._folder):
            raise FileNotFoundError(f"there is no MDS dataset at {self._folder}; give the folder of its index.json")
        stamp = self._state()
        with self._cache.open(path) as local:
            found = read_index(local.path, path, self._folder)
            stamp = stamp or os.path.basename(local.path)
        return MdsIndex(
            self._folder, found, self._stream, self._columns, self._decoding, self._classes, self._cache, stamp
        )

    def close(self) -> None:
        """See `Store`."""
        if self._index is not None:
            self._index.shards.close()
        super().close()

    def _open_steps(self, number: int) -> MdsSteps:
        return MdsSteps(self.index, number, self._ahead, functools.partial(self.name_of, number))

    def key(self, number: int) -> str:
        index: MdsIndex = self.index
        return index.key(self._check_number(number))

    def metadata(self, number: int) -> Mapping[str, Any]:
        number, index = self._check_number(number), self.index
        return {} if index.table is None else index.table.note(number)

    def _version(self) -> str:
        return "2"

    def _metadata(self) -> Mapping[str, Any]:
        found: DatasetIndex = self.index.found
        return {
            **found.note.get("metadata", {}),
            "stream": self.index.kind,
            "columns": dict(zip(found.names, found.encodings, strict=True)),
            "shards": len(found.shards),
            "samples": int(self.index.firsts[-1]),
            "compression": found.shards[0].compression if found.shards else None,
        }

    def _disk_bytes(self) -> int | None:
        if is_url(self._folder):
            return None
        with os.scandir(self._folder) as files:
            return sum(file.stat().st_size for file in files if file.is_file())

    def _problems(self, progress: Callable[[int, int], Any] | None) -> Iterator[str]:
        """Compare shards with their hashes, and read the streams."""
        damaged = []
        for shard in range(len(self.index.found.shards)):
            try:
                self.index.shards.verify(shard)
            except (OSError, ValueError) as error:
                damaged.append(str(error))
        yield from damaged
        for problem in super()._problems(progress):
            if not any(text in problem for text in damaged):  # of a stream in such a shard
                yield problem
