"""What the package logs, under the name `stream_dataloader`, beside a warning of Python's.

Guarantee: where nobody set up logging, nothing is said twice.
"""

from __future__ import annotations

import logging
import warnings

from stream_dataloader.errors import shown_lines

__all__ = ["log", "warn"]

log = logging.getLogger("stream_dataloader")


def warn(text: str, stacklevel: int, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, and log it too. Without handlers Python would print the record beside the warning."""
    text = shown_lines(text)
    if log.hasHandlers():
        log.warning("%s", text)
    warnings.warn(text, category, stacklevel=stacklevel + 1)
