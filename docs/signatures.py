"""Writes signatures and tables of parameters into the pages of the reference, so that they can be read on GitHub.

A page holds a directive of mkdocstrings in a comment, and behind it what is written here:

    <!--
    ::: stream_dataloader.interleave
    -->
    ## interleave
    ...
    <!-- end -->

The site shows the directive's whole docstring instead (`docs/site.py`). `docs/api.py` writes the pages, and a test
compares them with the code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

#: A directive in a comment, and what was written behind it the last time.
BLOCK = re.compile(r"<!--\n(:::.*?)-->\n.*?<!-- end -->", re.DOTALL)

#: Sections of a docstring that become tables, with the heading of their first column.
TABLES = {"Args": "Parameter", "Attributes": "Field"}

#: Parameters that only exist to raise errors with a remedy.
UNSHOWN = {"misplaced"}

WIDTH = 96


@dataclass(frozen=True)
class Documented:
    """A class, function or property, as a page shows it.

    Attributes:
        name: Its name.
        signature: Its parameters with their defaults, or None for a property.
        doc: Its docstring.
        types: The types of parameters and fields, as the code spells them.
        members: Its public members.
    """

    name: str
    signature: list[str] | None
    doc: str
    types: dict[str, str] = field(default_factory=dict)
    members: tuple[Documented, ...] = ()


def pages(folder: Path) -> Iterator[Path]:
    """The pages that hold directives."""
    return (page for page in sorted(folder.glob("*.md")) if BLOCK.search(page.read_text("utf-8")))


def written_anew(page: str) -> str:
    """The page with the present signatures and tables."""
    return BLOCK.sub(lambda found: f"<!--\n{found[1]}-->\n{block_of(found[1])}\n<!-- end -->", page)


def block_of(directive: str) -> str:
    """The Markdown for one directive."""
    path = directive.split()[1]
    options = dict(re.findall(r"^ +(\w+): (.+)$", directive, re.MULTILINE))
    level = int(options.get("heading_level", 2))
    names = options.get("members")
    only = re.findall(r"\w+", names) if names is not None else None
    owner, _, name = path.rpartition(".")
    if owner.startswith("stream_dataloader.integrations"):
        return "\n\n".join(shown(in_source(ROOT / f"{owner.replace('.', '/')}.py", name), level))
    if inspect.ismodule(found := resolved(path)):
        values = [getattr(found, one) for one in only or found.__all__]
        listed = [
            documented(one) for one in values if inspect.isclass(one) or inspect.isfunction(one)
        ]
        text = inspect.cleandoc(found.__doc__ or "").partition("\n\n")[2] if only is None else ""
        blocks = [block for one in listed if one.doc for block in shown(one, level)]
        return "\n\n".join([prose(text)] * bool(text) + blocks)
    return "\n\n".join(shown(documented(found, only, "inherited_members" in options), level))


def resolved(path: str) -> Any:
    """The object that a dotted path names."""
    try:
        return importlib.import_module(path)
    except ImportError:
        owner, _, name = path.rpartition(".")
        return getattr(resolved(owner), name)


def documented(value: Any, only: list[str] | None = None, inherited: bool = False) -> Documented:
    """A class or function that has been imported."""
    doc = inspect.cleandoc(value.__doc__ or "")
    if not inspect.isclass(value):
        return Documented(value.__name__, parameters_of(value), doc, types_of(value))
    bases = [one for one in value.__mro__ if one.__module__.startswith("stream_dataloader")]
    homes = bases if inherited else bases[:1]
    names = [name for home in homes for name in vars(home)] if only is None else only
    fields = {
        name: spelled(kind)
        for base in reversed(bases)
        for name, kind in vars(base).get("__annotations__", {}).items()
    }
    is_protocol = getattr(value, "_is_protocol", False)
    return Documented(
        value.__name__,
        None if is_protocol else parameters_of(value),
        doc,
        fields | ({} if is_protocol else types_of(value)),
        tuple(one for name in dict.fromkeys(names) for one in member_of(value, name)),
    )


def member_of(kind: type, name: str) -> Iterator[Documented]:
    """A public method or property that has a docstring."""
    value = inspect.getattr_static(kind, name, None)
    function = getattr(value, "__func__", value)
    doc = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    if name.startswith("_") or not doc:
        return
    if inspect.isfunction(function):
        yield Documented(name, parameters_of(function)[1:], doc)
    elif isinstance(value, property) or type(value).__name__ == "cached_property":
        yield Documented(name, None, doc)


def parameters_of(function: Any) -> list[str]:
    """The parameters with their defaults, without types."""
    every = inspect.signature(function).parameters.values()
    shown = [one for one in every if one.name[0] != "_" and one.name not in UNSHOWN]
    inside = str(inspect.Signature([one.replace(annotation=one.empty) for one in shown]))[1:-1]
    inside = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", inside).replace("<factory>", "...")
    return separated(re.sub(r"'([^'\"]*)'", r'"\1"', inside))


def separated(arguments: str) -> list[str]:
    """The arguments of a call one by one, of which a default may have commas of its own."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def types_of(function: Any) -> dict[str, str]:
    """The types of parameters, as the code spells them."""
    every = inspect.signature(function).parameters.values()
    return {one.name: spelled(one.annotation) for one in every if one.annotation is not one.empty}


def spelled(annotation: Any) -> str:
    """An annotation as text; empty if the code does not keep it as text."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return text if isinstance(text, str) else ""


def in_source(path: Path, name: str) -> Documented:
    """A class whose module needs a package that may not be installed: it is read, not imported."""
    tree = ast.parse(path.read_text("utf-8"))
    (kind,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    methods = [one for one in kind.body if isinstance(one, ast.FunctionDef)]
    (init,) = [one for one in methods if one.name == "__init__"]
    types = {
        one.arg: ast.unparse(one.annotation)
        for one in (*init.args.args, *init.args.kwonlyargs)
        if one.annotation
    }
    members = [
        Documented(one.name, bare_arguments(one), ast.get_docstring(one) or "")
        for one in methods
        if one.name[0] != "_" and ast.get_docstring(one)
    ]
    doc = ast.get_docstring(kind) or ""
    return Documented(name, bare_arguments(init), doc, types, tuple(members))


def bare_arguments(function: ast.FunctionDef) -> list[str]:
    """The arguments with their defaults, without types and `self`."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return separated(ast.unparse(function.args))[1:]


def shown(one: Documented, level: int) -> Iterator[str]:
    """The blocks of Markdown for one class or function."""
    yield f"{'#' * level} {one.name}"
    if one.signature is not None:
        yield f"```pyi\n{wrapped(one.name, one.signature)}\n```"
    sections = sections_of(one.doc)
    yield prose(sections.pop(""))
    for title, text in sections.items():
        if title in TABLES:
            yield table_of(TABLES[title], text, one.types)
        elif title == "Raises":
            entries = entries_of(text)
            yield "\n".join(
                ["| Raises | When |", "|---|---|"]
                + [f"| `{name}` | {cell(told)} |" for name, told in entries]
            )
        elif title in ("Returns", "Yields"):
            yield f"{title}: {' '.join(text.split())}"
        elif title == "Example":
            yield f"```pycon\n{text.removeprefix('::').strip()}\n```"
    if one.members:
        rows = [f"| {call_of(member)} | {cell(summary_of(member.doc))} |" for member in one.members]
        yield "\n".join(["| Member | |", "|---|---|", *rows])


def call_of(member: Documented) -> str:
    """A member as it is used."""
    inside = "" if member.signature is None else f"({', '.join(member.signature)})"
    return f"`{cell(member.name + inside)}`"


def wrapped(name: str, parameters: Iterable[str]) -> str:
    """A signature in lines that fit on a page."""
    inside = ", ".join(parameters)
    if len(line := f"{name}({inside})") <= WIDTH:
        return line
    lines = textwrap.wrap(inside, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return "\n".join([f"{name}(", *(f"    {line}" for line in lines), ")"])


def sections_of(doc: str) -> dict[str, str]:
    """The sections of a docstring in Google's style; the text before them has an empty name."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Example):", doc, flags=re.MULTILINE)
    texts = [textwrap.dedent(text.removeprefix(":").lstrip("\n")) for text in parts[2::2]]
    return {"": parts[0].rstrip(), **dict(zip(parts[1::2], texts, strict=True))}


def table_of(heading: str, text: str, types: dict[str, str]) -> str:
    """A table of parameters or fields."""
    lines = [f"| {heading} | Type | Meaning |", "|---|---|---|"]
    for name, told in entries_of(text):
        kind = types.get(name.lstrip("*"), "")
        lines.append(f"| `{name}` | {kind and f'`{cell(kind)}`'} | {cell(told)} |")
    return "\n".join(lines)


def entries_of(text: str) -> list[tuple[str, str]]:
    """The names in a section of a docstring, each with its text in one line."""
    found = re.findall(r"^(\*{0,2}\w+): (.*(?:\n(?: .*)?$)*)", text, re.MULTILINE)
    return [(name, " ".join(told.split())) for name, told in found]


def summary_of(doc: str) -> str:
    """The first sentence or sentences: the docstring up to its first empty line."""
    return " ".join(doc.partition("\n\n")[0].split())


def prose(text: str) -> str:
    """A docstring's paragraphs; `::` before code, which is for plain text, becomes a colon."""
    text = re.sub(r"^::\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def cell(text: str) -> str:
    """Text in a table, in which a bar would begin a new cell."""
    return text.replace("|", "\\|")
