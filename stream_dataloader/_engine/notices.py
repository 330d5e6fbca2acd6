"""Log records under the name `stream_dataloader`, and warnings that are logged, too.

Guarantee: if logging is not set up, nothing is printed twice.
"""

from __future__ import annotations

import logging
import warnings

from stream_dataloader.errors import shown_lines

__all__ = ["log", "warn"]

log = logging.getLogger("stream_dataloader")


def warn(text: str, stacklevel: int, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, and also log the text if there are handlers; without any, Python would print both."""
    text = shown_lines(text)
    if log.hasHandlers():
        log.warning("%s", text)
    warnings.warn(text, category, stacklevel=stacklevel + 1)
