"""The order of names with numbers in them: `clip2` comes before `clip10`."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["DIGITS", "natural_order"]

DIGITS = re.compile("([0-9]+)")


def natural_order(name: str) -> tuple[Any, str]:
    """Sorts names with numbers as numbers, as the `key` of `sorted`."""
    parts = DIGITS.split(name)
    digits = [part.lstrip("0") for part in parts[1::2]]
    return list(zip(parts[::2], [*((len(found), found) for found in digits), (0, "")], strict=True)), name
