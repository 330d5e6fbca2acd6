"""The order of names with numbers in them.

Guarantee: `clip2` comes before `clip10`, and names that differ have one order.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["DIGITS", "natural_order"]

DIGITS = re.compile("([0-9]+)")


def natural_order(name: str) -> tuple[list[Any], str]:
    """Sorts names with numbers as numbers, as the `key` of `sorted`."""
    parts: list[Any] = DIGITS.split(name)
    parts[1::2] = map(int, parts[1::2])
    return parts, name
