"""Prepares docstrings for the site; an extension of griffe, which mkdocstrings reads them with.

Google's style calls a section with code `Example:`. griffe knows only `Examples:`, and takes the other for prose, in
which brackets are links.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Renames the section, and drops the `::` that introduces code in plain text."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None:
            text = re.sub(
                r"^(\s*)Example:(:?)$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
            obj.docstring.value = re.sub(r"^\s*::\n", "", text, flags=re.MULTILINE)
