"""Writes the public names with their signatures, so that a change of the public face shows in a diff.

    python docs/api.py [FOLDER]

Writes `api.txt`, and the signatures and tables of parameters in the pages beside it, to `docs/reference` by default. A
test compares these files with what is written anew.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from stream_dataloader.cli.main import _parser

import signatures

MODULES = [
    "stream_dataloader",
    "stream_dataloader.errors",
    "stream_dataloader.protocols",
    "stream_dataloader.recurrent",
    "stream_dataloader.stats",
    "stream_dataloader.streams",
    "stream_dataloader.stores",
    "stream_dataloader.testing",
    "stream_dataloader.visualize",
]

#: Modules that need a package that may not be installed: they are read, not imported.
INTEGRATIONS = ["accelerate", "lightning", "transformers"]

ROOT = Path(__file__).parent.parent

#: Members to list of classes that have others, without an underscore, for the library's own use.
MEMBERS = {
    "FileCache": ["open"],
    "Store": [
        "close",
        "info",
        "key",
        "length",
        "lengths",
        "metadata",
        "number",
        "sources",
        "verify",
    ],
}


def names_of(module: ModuleType) -> list[str]:
    """The module's `__all__`, or else what it defines without an underscore."""
    defined = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
    ]
    return sorted(getattr(module, "__all__", defined))


def signature_of(function: Any) -> str:
    """Parameters with their defaults, without types: Python's versions spell those in different ways."""
    parameters = inspect.signature(function).parameters.values()
    bare = [one.replace(annotation=one.empty) for one in parameters if one.name[0] != "_"]
    return str(inspect.Signature(bare))


def members_of(kind: type, listed: set[type]) -> Iterator[str]:
    """A class's public methods, properties and fields, but for those of a class that is listed by itself."""
    fields = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    for name in MEMBERS.get(kind.__name__, sorted({*dir(kind), *fields})):
        homes = [
            base
            for base in kind.__mro__
            if name in {*vars(base), *vars(base).get("__annotations__", {})}
        ]
        ours = homes and homes[0].__module__.startswith("stream_dataloader")
        if name.startswith(("_", "test_")) or not ours or listed.intersection(homes) - {kind}:
            continue
        value = inspect.getattr_static(kind, name, None)
        function = getattr(value, "__func__", value)
        yield name + (signature_of(function) if inspect.isfunction(function) else "")


def lines() -> Iterator[str]:
    """The file, line by line."""
    faces = {module: names_of(module) for module in map(importlib.import_module, MODULES)}
    values = [getattr(module, name) for module, names in faces.items() for name in names]
    told: set[Any] = set()
    listed = {value for value in values if inspect.isclass(value)}
    for module, names in faces.items():
        yield module.__name__
        for name in names:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"    {name}{signature_of(value)}"
            elif not inspect.isclass(value) or issubclass(value, Exception) or value in told:
                yield f"    {name}"
            else:
                told.add(value)
                is_protocol = getattr(value, "_is_protocol", False)
                yield f"    class {name}{'' if is_protocol else signature_of(value)}"
                yield from (f"        {member}" for member in members_of(value, listed))
        yield ""
    for name in INTEGRATIONS:
        yield f"stream_dataloader.integrations.{name}"
        yield from written(ROOT / "stream_dataloader" / "integrations" / f"{name}.py")
        yield ""
    yield "stream-dataloader"
    for name, parser in commands_of(_parser()).items():
        flags = [
            flag for action in parser._actions for flag in action.option_strings or [action.dest]
        ]
        yield f"    {name}: {' '.join(sorted(flags))}"
    yield ""
    yield "extras"
    extras = (
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("\n[")[0]
    )
    yield f"    {' '.join(sorted(re.findall(r'^([a-z0-9]+) = ', extras, re.MULTILINE)))}"
    yield ""


def written(path: Path) -> Iterator[str]:
    """The public names of a module that is not imported, with what it defines of them."""
    tree = ast.parse(path.read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    public = next(
        ast.literal_eval(node.value)
        for node in assigned
        if ast.unparse(node.targets[0]) == "__all__"
    )
    defined = {
        node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    for name in public:
        node = defined.get(name)
        if isinstance(node, ast.FunctionDef):
            yield f"    {name}{arguments_of(node)}"
            continue
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef)] if node else []
        init = [arguments_of(one) for one in methods if one.name == "__init__"]
        yield f"    class {name}{init[0].replace('self, ', '') if init else ''}"
        yield from (
            f"        {one.name}{arguments_of(one)}" for one in methods if one.name[0] != "_"
        )


def arguments_of(function: ast.FunctionDef) -> str:
    """Parameters with their defaults, without types."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(function.args)})"


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of the program, by name."""
    return next(
        dict(action.choices)
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Writes the public names with their signatures.")
    here = Path(__file__).parent / "reference"
    parser.add_argument("folder", nargs="?", type=Path, default=here)
    folder = parser.parse_args().folder
    (folder / "api.txt").write_text("\n".join(lines()), encoding="utf-8")
    for page in signatures.pages(here):
        text = signatures.written_anew(page.read_text("utf-8"))
        (folder / page.name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
