"""Texts, read lazily: the bytes, characters or tokens of files and strings are time steps.

Guarantee: units are the same wherever reading begins. Only one block of a file is in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import operator
import os
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from stream_dataloader._engine.hints import hinted
from stream_dataloader.errors import shorten
from stream_dataloader.streams._media.section import (
    check_numbers,
    check_options,
    closed_on_error,
    section_of,
)
from stream_dataloader.streams._media.targets import IGNORE_INDEX, check_ignore_index
from stream_dataloader.streams.cache import FileCache, is_url
from stream_dataloader.streams.text.bytes import TextBytes, encoding_name, in_utf8, is_compressed, open_text
from stream_dataloader.streams.text.numbers import (
    Codes,
    character_table,
    check_tokenizer,
    is_thread_safe,
    tokenizing,
    tokens_of,
)
from stream_dataloader.streams.text.reader import TextReader, TokenReader

__all__ = ["TextStream"]

_BLOCK_LIMITS = ("give at least 16", 16)


@hinted
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStream:
    r"""Factory of streams from texts, with one byte, character or token for each time step.

    A source is the path of a text file, which may be compressed (`.gz`, `.zst`). A source `(path, start,
    stop)` has some bytes of an uncompressed file in UTF-8; a unit belongs to the section of its first byte.
    With `of="strings"` a source is the text itself.

    The tokenizer gets one line at a time, with its newline. A line that fills a block of
    `longest_line_bytes` is split there, before its first space. Text that a resume skips is not checked.

    Attributes:
        of: Kind of sources: "files" or "strings". It is never guessed.
        units: Kind of items: "bytes"; "characters", as code points or as numbers of the
            vocabulary; or "tokens". None: tokens if there is a tokenizer, else characters.
        tokenizer: A `tokenizers.Tokenizer` or the path of its file, used without special
            tokens, truncation and padding; or a function of a text that returns a list of ints.
        encoding: Encoding of files. Only UTF-8 has sections. A byte order mark is left out.
        errors: Action for invalid bytes: "raise", or "replace" them with U+FFFD.
        newlines: "universal" reads "\r\n" and "\r" as "\n"; "keep" does not. None: "keep" for bytes alone.
        vocabulary: The numbers of characters: a mapping, or a string of them in order.
        unknown: Number for characters that are not in the vocabulary; None: they are an error.
        targets: Items are `{"input": unit, "target": next unit}`. Targets are int64.
        ignore_index: Target of a source's last unit; give the loss the same number.
        dtype: Dtype of units; targets are always int64. None: uint8 for bytes, otherwise int64.
        block_bytes: Bytes to read at a time.
        longest_line_bytes: For tokens: a line of at most this length is never split.
        cache: Cache for files from URLs.

    Raises:
        ValueError: An option is out of range, or contradicts another one.
        TypeError: An option has the wrong type.
        FileNotFoundError: The tokenizer's file is missing.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.streams import TextStream
        >>> open_text = TextStream(of="strings", vocabulary="abcdefgh", targets=True)
        >>> dataset = StreamDataset(["abcdefg", "hgf"], open_text, batch_size=2, time_steps=3)
        >>> for batch in StreamDataLoader(dataset):
        ...     print(batch.data["input"].T.tolist(), batch.data["target"].T.tolist())
        [[0, 1, 2], [7, 6, 5]] [[1, 2, 3], [6, 5, -100]]
        [[3, 4, 5], [0, 0, 0]] [[4, 5, 6], [0, 0, 0]]
        [[6, 0, 0], [0, 0, 0]] [[-100, 0, 0], [0, 0, 0]]
    """

    _yields_steps: ClassVar[bool] = True

    of: Literal["files", "strings"] = "files"
    units: Literal["bytes", "characters", "tokens"] | None = None
    tokenizer: Any = None
    encoding: str = "utf-8"
    errors: Literal["raise", "replace"] = "raise"
    newlines: Literal["universal", "keep"] | None = None
    vocabulary: str | Mapping[str, int] | None = None
    unknown: int | None = None
    targets: bool = False
    ignore_index: int = IGNORE_INDEX
    dtype: Any = None
    block_bytes: int = 1 << 16
    longest_line_bytes: int = 1 << 16
    cache: FileCache | None = None

    def __post_init__(self) -> None:
        units = self.units or ("characters" if self.tokenizer is None else "tokens")
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "newlines", self.newlines or ("keep" if units == "bytes" else "universal"))
        dtype = self.dtype or ("uint8" if units == "bytes" else "int64")
        dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        object.__setattr__(self, "dtype", np.dtype(dtype))
        check_options(self)
        encoding_name(self.encoding)
        if self.dtype.kind not in "iu":
            raise ValueError(f"dtype is {self.dtype}; give int64, int32, uint8, ...")
        check_numbers(self, block_bytes=_BLOCK_LIMITS, longest_line_bytes=_BLOCK_LIMITS)
        if (units == "tokens") != (self.tokenizer is not None):
            raise ValueError(f"units is {units!r} and tokenizer is {self.tokenizer!r}; only tokens need one")
        if units == "bytes" and self.dtype == np.int8:
            raise ValueError("dtype is int8, which does not hold bytes; give uint8")
        if units == "bytes" and self.newlines == "universal":
            raise ValueError("newlines is 'universal', and bytes are read as they are")
        if self.vocabulary is not None:
            if units != "characters":
                raise ValueError(f"a vocabulary is for characters, and units is {units!r}")
            character_table(self.vocabulary, self.unknown, self.dtype)
        elif self.unknown is not None:
            raise ValueError(f"unknown is {self.unknown}, without a vocabulary; give one")
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer)
        ignore_index = check_ignore_index(self.ignore_index, targets=self.targets, tokens=self._known_units())
        object.__setattr__(self, "ignore_index", ignore_index)

    def _known_units(self) -> Container[int]:
        """Numbers that units may have. Those of tokens are not known."""
        if self.units == "tokens":
            return ()
        if self.vocabulary is None:
            return range(256 if self.units == "bytes" else sys.maxunicode + 1)
        numbers = self.vocabulary.values() if isinstance(self.vocabulary, Mapping) else range(len(self.vocabulary))
        return {*numbers, *([] if self.unknown is None else [self.unknown])}

    @property
    def _codec_errors(self) -> str:
        """The option `errors` in Python's words."""
        return "strict" if self.errors == "raise" else "replace"

    @property
    def open_early(self) -> bool:
        """Whether streams may be opened early: they share only the tokenizer, which may be the user's own code."""
        return self.tokenizer is None or is_thread_safe(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # no cached properties

    def __call__(self, source: Any, *, start: int = 0) -> TextReader:
        """Open one source at item `start`, counted from the source's first item.

        Raises:
            ValueError: The text is empty, damaged, or has fewer items than `start`.
            OSError: The file cannot be read.
        """
        if start < 0:
            raise ValueError(f"start is {start}; give the first item wanted, 0 or more")
        file, first, stop = self._open(source)
        with closed_on_error(file):
            reader = (TokenReader if self.units == "tokens" else TextReader)(self, file, first, stop)
            reader.begin_at(start)
        return reader

    def length(self, source: Any) -> int | None:
        """Return the number of items of a source, or None if only reading would tell."""
        if self.of == "files" and is_compressed(section_of(source).path):
            return None
        file, first, stop = self._open(source)
        with contextlib.closing(file):
            return None if self.units == "tokens" else TextReader(self, file, first, stop).length()

    def _open(self, source: Any) -> tuple[TextBytes, int, int | None]:
        """Return the text's bytes, and the section of them that the source names."""
        if self.of == "strings":
            if not isinstance(source, str):
                raise TypeError(f"the source is a {type(source).__name__}; of='strings' takes strings")
            if not source:
                raise ValueError("the text is empty, a string without a character")
            encoding = ("utf-8", "surrogatepass") if self.units != "bytes" else (self.encoding, self._codec_errors)
            return TextBytes(source.encode(*encoding)), 0, None
        path, first, stop = section_of(source)
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise TypeError(f"the source is a {type(path).__name__}; give a path")
        first, stop = operator.index(first), None if stop is None else operator.index(stop)
        try:
            file = open_text(path, self.cache)
        except (OSError, ValueError) as error:
            if not isinstance(path, str) or is_url(path) or os.path.exists(path):
                raise
            remedy = "of='strings' reads texts themselves"
            if glob.has_magic(path):
                remedy = "a source is one file: pass sorted(glob.glob(...)) as the sources"
            raise FileNotFoundError(f"there is no file {shorten(path)}; {remedy}") from error
        with closed_on_error(file):
            if self.units != "bytes":
                file = in_utf8(file, encoding_name(self.encoding), self._codec_errors)
            self._check(file, first, stop)
        return file, first, stop

    def _check(self, file: TextBytes, first: int, stop: int | None) -> None:
        """Raise if a text has no character, or if a section is not in the file."""
        if first or stop is not None:
            if file.size is None and is_compressed(file.name):
                raise ValueError(f"{file.name} is compressed, and has no sections; decompress it")
            if file.size is None:
                raise ValueError(f"{file.name} is {self.encoding}; give whole files, or convert them to utf-8")
            if max(first, stop or 0) > file.size:
                raise ValueError(f"{file.name} has {file.size} bytes, not {first} to {stop}")
            return
        mark = TextReader(self, file).mark_bytes
        if not file.read_at(mark, 1):
            file.check()
            what = "its byte order mark" if mark or not is_compressed(file.name) else "its compression"
            raise ValueError(f"{file.name} is empty, but for {what}")

    @functools.cached_property
    def _table(self) -> tuple[Codes | None, str]:
        """The table of `character_table`, or None if bytes are the units."""
        if self.units != "characters":
            return None, ""
        return character_table(self.vocabulary, self.unknown, self.dtype)

    @functools.cached_property
    def _tokenize(self) -> Callable[[str], Codes]:
        """Function that returns the tokens of a piece of text."""
        return functools.partial(tokens_of, tokenizing(self.tokenizer), self.dtype)
