"""What the package logs, under the name `stream_dataloader`, beside a warning of Python's.

Guarantee: where nobody set up logging, nothing is told twice.
"""

from __future__ import annotations

import logging

__all__ = ["log", "log_warned"]

log = logging.getLogger("stream_dataloader")


def log_warned(text: str) -> None:
    """Log what a Python warning tells too. Without handlers Python would print the record beside the warning."""
    if log.hasHandlers():
        log.warning("%s", text)
