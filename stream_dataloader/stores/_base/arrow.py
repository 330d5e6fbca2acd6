"""pyarrow, and its files that may hold anything.

Guarantee: what pyarrow raises about damage becomes the error that the format makes of it; errors of the disk stay what
they are. No Parquet file is read ahead by threads: a worker is forked from a process that may have read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stream_dataloader.errors import StoreError

__all__ = ["arrow_errors", "open_parquet", "pyarrow_of"]


def pyarrow_of(user: str) -> Any:
    """The package pyarrow, with `parquet` and `ipc`.

    Raises:
        ImportError: It is not installed; names the extra.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{user} needs pyarrow: pip install 'stream-dataloader[arrow]' ({error})") from error
    return pyarrow


@contextmanager
def arrow_errors(damaged: Callable[[BaseException], StoreError]) -> Iterator[None]:
    """Have what pyarrow raises about damage raise what `damaged` makes of it.

    Raises:
        StoreError: What `damaged` returned.
        OSError: The file cannot be read.
    """
    import pyarrow

    try:
        yield
    except StoreError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise damaged(error) from error


def open_parquet(path: str, metadata: Any = None, **options: Any) -> Any:
    """A `ParquetFile` that compares pages with their checksums; `metadata` is its footer, if it was read before."""
    file = pyarrow_of("Parquet").parquet.ParquetFile
    return file(path, metadata=metadata, pre_buffer=False, page_checksum_verification=True, **options)
