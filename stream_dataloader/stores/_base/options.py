"""Options of stores: what they may be, and older names that they are known by."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from stream_dataloader.errors import shorten
from stream_dataloader.streams._media.section import check_flags

__all__ = ["check_options", "given_columns", "given_options", "renamed"]

P = ParamSpec("P")
R = TypeVar("R")


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function take options by older names too, `old="new"`, and warn of them."""

    def with_older_names(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def taking(*args: P.args, **options: P.kwargs) -> R:
            for old in names.keys() & options.keys():
                if (new := names[old]) in options:
                    raise TypeError(f"{old}= is an older name of {new}=; give one of them")
                warnings.warn(f"{old}= is called {new}= now", DeprecationWarning, stacklevel=2)
                options[new] = options.pop(old)
            return function(*args, **options)

        taking.older_names = names  # type: ignore[attr-defined]
        return taking

    return with_older_names


def check_options(kind: Callable[..., object], options: Mapping[str, object], taken: str) -> None:
    """Refuse options that a format has not, and flags that are none."""
    known = [option for option in signature(kind).parameters if option not in ("path", "folder")]
    if unknown := sorted(options.keys() - {*known, *getattr(kind.__init__, "older_names", ())}):
        what = f"{taken}, which has no option {unknown[0]!r}"
        raise TypeError(f"{what}; it has {', '.join(known)}; format= names another")
    check_flags(kind, options)


def given_options(values: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """The options among a constructor's `locals()`, some of them `changed`."""
    return {name: value for name, value in values.items() if name not in ("self", "path", "__class__")} | changed


def given_columns(columns: Any, *, alone: bool = False) -> Any:
    """The option `columns`: names, None, or with `alone` one name."""
    if columns is None or (alone and isinstance(columns, str) and columns):
        return columns
    names = list(columns) if isinstance(columns, Iterable) and not isinstance(columns, str) else [None]
    if not all(isinstance(name, str) for name in names):
        more = ", one by itself" if alone else ""
        raise TypeError(f"columns is {shorten(columns)}; give a list of names{more}, or None for all")
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"columns is {shorten(columns)}; give each once, or None for all")
    return names
