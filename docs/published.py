"""Makes the package's description of the README; a metadata hook of hatchling.

On a package index relative links lead nowhere. Once `[project.urls]` in pyproject.toml has an address, they become
links into the repository at the tag of the version.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parents[1]


class PublishedReadme(MetadataHookInterface):
    """Sets `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set it."""
        site = runpy.run_path(str(ROOT / "docs" / "site.py"))
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        if address := metadata.get("urls", {}).get("Repository", ""):
            text = site["with_public_links"](text, address, site["version_of_package"]())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
