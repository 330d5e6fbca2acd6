"""Adds to the site what is written elsewhere: the front page's buttons and facts, pages of examples and the tutorial.

A hook of mkdocs. The version is the package's. The public address is that of `[project.urls]` in pyproject.toml: while
there is none, the site has no link to it. The page of examples is `examples/README.md`, with the first file in full.
The tutorial's page has the notebook's cells, without what they display.
`docs/published.py` makes links of the README with the same address.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def public_address(pyproject: str) -> str:
    """The repository's address, or an empty string while there is none."""
    found = re.search(r'^Repository = "(.*)"', pyproject, re.MULTILINE)
    return found.group(1) if found else ""


def version_of_package() -> str:
    """The version, without importing the package."""
    module = (ROOT / "stream_dataloader" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"', module, re.MULTILINE)
    return str(version)


def with_public_links(readme: str, address: str, version: str) -> str:
    """The README with links into the repository at the version's tag, in place of relative ones."""
    address = address.rstrip("/")
    pictures = re.sub(
        r"(!\[[^]]*\]\()(?!https?:)([^)]+)", rf"\1{address}/raw/v{version}/\2", readme
    )
    return re.sub(r"(\]\()(?!https?:|#)([^)]+)", rf"\1{address}/blob/v{version}/\2", pictures)


def front_page(page: str, address: str, version: str) -> str:
    """The front page with buttons, an install line and facts behind its first paragraph."""
    buttons = [
        "[Get started](get-started.md){ .md-button .md-button--primary }",
        "[Examples](examples.md){ .md-button }",
        *([f"[GitHub]({address}){{ .md-button }}"] if address else []),
    ]
    facts = f"Version {version} · MIT licence · Python 3.10 or later · Linux"
    heading, first, rest = page.split("\n\n", 2)
    install = "```sh\npip install .  # in a clone\n```"
    return "\n\n".join([heading, first, " ".join(buttons), install, facts, rest])


def examples_page(table: str, program: str) -> str:
    """The table of examples, and the source of the one to copy."""
    table = re.sub(r"\]\(train\.py\)", "](#trainpy)", table)
    return f"{table}\n## train.py\n\n```python\n{program}```\n"


def tutorial_page(notebook: str) -> str:
    """The cells of the notebook, one after the other."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    parts = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells]
    return "\n\n".join([*parts[:1], "A notebook to run: `docs/tutorial.ipynb`.", *parts[1:]]) + "\n"


def with_pages(markdown: str, depth: int) -> str:
    """A page whose links to examples and to the notebook lead to their pages."""
    markdown = markdown.replace("](tutorial.ipynb)", "](tutorial.md)")
    page = "../" * depth + "examples.md"
    markdown = re.sub(r"\]\((?:\.\./)+examples/README\.md\)", f"]({page})", markdown)
    return re.sub(r"\]\((?:\.\./)+examples/train\.py\)", f"]({page}#trainpy)", markdown)


def with_docstrings(markdown: str) -> str:
    """A page of the reference with whole docstrings, in place of the tables that `docs/signatures.py` wrote."""
    return re.sub(r"<!--\n(:::.*?)-->\n.*?<!-- end -->", r"\1", markdown, flags=re.DOTALL)


def on_config(config: Any) -> Any:
    """Take the public address."""
    config.repo_url = public_address((ROOT / "pyproject.toml").read_text(encoding="utf-8")) or None
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of examples and of the tutorial."""
    from mkdocs.structure.files import File

    table, program = (
        (ROOT / "examples" / name).read_text("utf-8") for name in ("README.md", "train.py")
    )
    files.append(File.generated(config, "examples.md", content=examples_page(table, program)))
    tutorial = tutorial_page((ROOT / "docs" / "tutorial.ipynb").read_text("utf-8"))
    files.append(File.generated(config, "tutorial.md", content=tutorial))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Complete the front page, and let links to what has a page lead there."""
    markdown = with_docstrings(with_pages(markdown, page.file.src_uri.count("/")))
    if page.file.src_uri != "index.md":
        return markdown
    return front_page(markdown, config.repo_url or "", version_of_package())
