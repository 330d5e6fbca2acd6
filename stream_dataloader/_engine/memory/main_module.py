"""Names of the user's script that a new process will find.

`spawn` and `forkserver` workers run the script again under another name, without the code under its main guard.
"""

from __future__ import annotations

import ast
import functools
import os
import symtable
import sys
from multiprocessing import process
from typing import Any, NamedTuple


class Script(NamedTuple):
    """Names that a script binds at its top level.

    Attributes:
        guarded: Names under `if __name__ == "__main__":`.
        free: Names elsewhere.
        has_guard: Whether there is such a line.
    """

    guarded: frozenset[str]
    free: frozenset[str]
    has_guard: bool


def hides_names() -> bool:
    """Return whether `__main__` has names that a newly started process may not find."""
    script = read_script()
    return script is None or bool(script.guarded) or bool(sys.flags.interactive)


def finds(value: Any, *, here: bool = False) -> bool:
    """Return whether a function or class of `__main__` is found by its name; not only `here`, also in a new process."""
    if getattr(value, "__module__", None) != "__main__":
        return False
    name: str = value.__qualname__
    found: Any = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        return False
    first = name.split(".", maxsplit=1)[0]
    script = None if here else read_script()
    return here or (script is not None and (not _known(script) or (first in script.free - script.guarded)))


def _known(script: Script) -> bool:
    return bool(script.free or script.guarded)


def read_script() -> Script | None:
    """Return the names that the script's text binds: none if it cannot be read; None if there is no script."""
    path = _path()
    return None if path is None else _read(path)


def missing_script() -> str | None:
    """Return the name of a script that new processes cannot run, such as `<stdin>`; None for any other program."""
    path = _path()
    return None if path is None or os.path.exists(path) else os.path.basename(path)


def _path() -> str | None:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return None if path is None else os.path.join(process.ORIGINAL_DIR or "", path)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4)
def _read(path: str) -> Script:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return Script(frozenset(), frozenset(), has_guard=True)
    guards = [node for node in tree.body if isinstance(node, ast.If) and _is_guard(node.test)]
    guarded = _bound([node for guard in guards for node in guard.body])
    otherwise = [node for guard in guards for node in guard.orelse]
    free = _bound([node for node in tree.body if node not in guards] + otherwise)
    free |= {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return Script(guarded, frozenset(free), bool(guards))


def _is_guard(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_guard, test.values))
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = {ast.unparse(test.left), ast.unparse(test.comparators[0])}
    return sides == {"__name__", "'__main__'"}


def _bound(statements: list[ast.stmt]) -> frozenset[str]:
    names = symtable.symtable(ast.unparse(ast.Module(statements, [])), "<script>", "exec").get_symbols()
    return frozenset(n.get_name() for n in names if n.is_assigned() or n.is_imported() or n.is_namespace())
