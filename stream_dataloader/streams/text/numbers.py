"""Numbers of characters and tokens: vocabularies and tokenizers.

Guarantee: a number that the dtype cannot hold raises an error.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["NOTHING", "Codes", "character_table", "check_tokenizer", "is_thread_safe", "tokenizing", "tokens_of"]

Codes = np.ndarray[Any, np.dtype[Any]]
NOTHING: Codes = np.zeros(0, np.uint8)

_LARGEST_CODE = 0x10FFFF


def check_tokenizer(tokenizer: Any) -> None:
    """Raise if the option is neither a tokenizer nor the path of a file."""
    if isinstance(tokenizer, (str, os.PathLike)):
        if not os.path.isfile(tokenizer):
            raise FileNotFoundError(
                f"tokenizer is {os.fspath(tokenizer)!r}, and there is no such file; give the path of a tokenizer.json, "
                "or an object: Tokenizer.from_pretrained(...) of the package tokenizers fetches one by its name"
            )
    elif not (callable(tokenizer) or hasattr(tokenizer, "encode")):
        raise TypeError(f"tokenizer is {tokenizer!r}; give a Tokenizer, its file, or a function")


def is_thread_safe(tokenizer: Any) -> bool:
    """Return True if several threads may use a tokenizer."""
    return isinstance(tokenizer, (str, os.PathLike)) or hasattr(tokenizer, "no_truncation")


def tokenizing(tokenizer: Any) -> Callable[[str], Any]:
    """Return the function that splits a text into tokens."""
    if isinstance(tokenizer, (str, os.PathLike)):
        path = os.fspath(tokenizer)
        try:
            import tokenizers
        except ImportError as error:
            remedy = "pip install 'stream-dataloader[text]'"
            raise ImportError(f"{path} is read with the package tokenizers: {remedy}") from error
        try:
            tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more specific
            raise ValueError(f"{path} is no tokenizer's file: {error}") from error
    if not hasattr(tokenizer, "no_truncation"):
        return tokenizer if callable(tokenizer) else tokenizer.encode  # type: ignore[no-any-return]
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        tokenizer = type(tokenizer).from_str(tokenizer.to_str())  # do not change the user's own
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def tokens_of(tokenize: Callable[[str], Any], dtype: np.dtype[Any], text: str) -> Codes:
    """Return the tokens of a text, checked and converted to the dtype."""
    found = tokenize(text)
    try:
        tokens: Codes = np.asarray(found)
    except Exception:
        tokens = np.asarray(None)
    if tokens.ndim == 1 and not len(tokens):
        return NOTHING
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(f"it returned {repr(found)[:80]}, and should return a list of ints")
    if not np.can_cast(tokens.dtype, dtype):
        limits = np.iinfo(dtype)
        if int(tokens.max()) > limits.max or int(tokens.min()) < limits.min:
            bad = next(token for token in tokens.tolist() if not limits.min <= token <= limits.max)
            raise ValueError(f"it returned {bad}, which {dtype} does not hold; choose another dtype")
    return tokens.astype(dtype, copy=not isinstance(found, list))  # the tokenizer may reuse its array


def character_table(vocabulary: Any, unknown: int | None, dtype: np.dtype[Any]) -> tuple[Codes | None, str]:
    """Return a table with the number of each code point, and the reason why some have -1.

    The table is None if code points are their own numbers. Its last number holds for all larger code points.
    """
    largest = int(np.iinfo(dtype).max)
    if vocabulary is None:
        if largest >= _LARGEST_CODE:
            return None, ""
        table = np.arange(largest + 2, dtype=np.int64)
        table[-1] = -1
        return table, f"which {dtype} does not hold; choose another dtype"
    if not isinstance(vocabulary, (str, Mapping)):
        raise TypeError(f"vocabulary is a {type(vocabulary).__name__}; give a string of characters, or a mapping")
    pairs = list(vocabulary.items() if isinstance(vocabulary, Mapping) else zip(vocabulary, itertools.count()))
    numbers = dict(pairs)
    if len(numbers) < len(pairs):
        twice = next(character for character in numbers if vocabulary.count(character) > 1)  # type: ignore[union-attr]
        raise ValueError(f"the vocabulary has {twice!r} twice; give each character once")
    for character, number in [*pairs, *([] if unknown is None else [("unknown", unknown)])]:
        if len(character) != 1 and character != "unknown":
            raise ValueError(f"the vocabulary has {character!r}; give single characters")
        if not 0 <= operator.index(number) <= largest:
            raise ValueError(f"the vocabulary has {number} for {character!r}; give 0 to {largest}, or another dtype")
    table = np.full(max(map(ord, numbers), default=0) + 2, -1 if unknown is None else unknown, np.int64)
    table[list(map(ord, numbers))] = list(numbers.values())
    return table, f"which is not in the vocabulary of {len(numbers)} characters; add it, or give unknown"
