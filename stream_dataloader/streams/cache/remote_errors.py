"""What becomes of an error of fsspec, aiohttp or botocore: another try, or a builtin error that names the URL.

Guarantee: an error that another try cannot cure is raised without one, as the builtin error of a local file.
"""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Iterator

__all__ = ["final_error", "text_of", "timed_out"]

#: Statuses below 500 after which another try may help: request timeout, too early (RFC 8470), too many requests.
_SERVER_IS_BUSY = (408, 425, 429)

#: Errors of this machine's disk, not of the network.
_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EMFILE, errno.ENFILE)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def final_error(url: str, error: Exception) -> Exception | None:
    """The error to raise for a failed try; None if another try may help."""
    chain = list(_chain(error))
    statuses = [getattr(link, "status", None) for link in chain]
    status = next((status for status in statuses if isinstance(status, int)), None)
    if any(isinstance(link, OSError) and link.errno in _OURS and link.filename for link in chain) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    ):
        return OSError(
            getattr(error, "errno", None),
            f"{url} was reached, and could not be stored: {text_of(error)}; make room, or set STREAM_DATALOADER_CACHE "
            "to another directory",
        )
    told = f"the server answered {status}" if status is not None else text_of(error)
    if status in (401, 403, 407) or isinstance(error, PermissionError):
        return PermissionError(f"{url} may not be read: {told}; check the credentials, see fsspec's storage options")
    if status in (404, 410):
        return FileNotFoundError(f"{url} is not there: {told}; check the address")
    if status is not None:
        if status >= 500 or status in _SERVER_IS_BUSY:
            return None
        return OSError(f"{url} cannot be read: {told}; check the address")
    if any(_is_of_the_network(link) for link in chain):
        return None
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{url} is not there: {told}; check the address")
    if isinstance(error, OSError):
        return None
    return ValueError(f"{url} cannot be read: {told}; check the address and the storage options")


def _is_of_the_network(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError, EOFError)):
        return True
    if (aiohttp := sys.modules.get("aiohttp")) and isinstance(error, aiohttp.ClientError):
        return not isinstance(error, aiohttp.InvalidURL)
    botocore = sys.modules.get("botocore.exceptions")
    return bool(botocore) and isinstance(error, (botocore.HTTPClientError, botocore.ConnectionError))  # type: ignore[union-attr]


def timed_out(error: Exception) -> bool:
    """Whether a time limit ended the try."""
    return any(isinstance(link, (TimeoutError, asyncio.TimeoutError)) for link in _chain(error))


def text_of(error: Exception) -> str:
    """The first cause of an error, in one line."""
    chain = list(_chain(error))
    root, text = chain[-1], " ".join(str(chain[-1]).split())
    return f"{type(root).__name__}: {text}" if text else type(root).__name__
