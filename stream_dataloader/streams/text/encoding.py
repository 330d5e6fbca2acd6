r"""Where the characters of an encoded text begin, how many there are, and what they are.

A character belongs to the byte at which it begins. "né\r\n" in UTF-8, with universal newlines, has three bytes at
which one begins, `6e c3 . 0d .`: the dots are the second byte of "é" and the "\n" of "\r\n". So a text can be cut in
two at any offset without decoding what is before: `boundary` is the first beginning at the offset or after it.

Guarantee: texts decoded between boundaries, put together, are the text decoded as a whole, also if bytes are invalid
and replaced. That holds for UTF-8, UTF-16, UTF-32 and all encodings with one byte a character. Others (Shift JIS,
UTF-7, ...) only have a decoder that reads forward, and so have no boundaries.
"""

from __future__ import annotations

import bisect
import codecs
import functools
import importlib
import sys
from typing import Any

import numpy as np

__all__ = ["AHEAD_BYTES", "BEHIND_BYTES", "Codes", "TextEncoding", "encoding_name"]

Codes = np.ndarray[Any, np.dtype[Any]]

#: Enough bytes behind an offset for `boundary`, and before one.
AHEAD_BYTES, BEHIND_BYTES = 8, 4

_WIDTHS = {"utf-8": 1, "utf-16-le": 2, "utf-16-be": 2, "utf-32-le": 4, "utf-32-be": 4}


def encoding_name(encoding: str) -> str:
    """The one name of an encoding that has many.

    Raises:
        ValueError: There is no such encoding of text.
    """
    try:
        b"a".decode(encoding, "replace")
        name = codecs.lookup(encoding).name
        codecs.getincrementaldecoder(encoding)
    except (LookupError, UnicodeError, TypeError) as error:
        raise ValueError(f"encoding is {encoding!r}, which Python does not know as an encoding of text") from error
    return name


@functools.lru_cache(maxsize=64)
def _is_single_byte(name: str) -> bool:
    """Whether each byte is a character, whatever is before it."""
    if name in ("ascii", "iso8859-1"):
        return True
    module = importlib.import_module(codecs.getincrementaldecoder(name).__module__)
    return hasattr(module, "decoding_table")  # as all of Python's that look up single bytes


@functools.lru_cache(maxsize=64)
def _has_ascii(name: str) -> bool:
    plain = bytes(range(128))
    return (name == "utf-8" or _is_single_byte(name)) and plain.decode(name, "replace") == plain.decode("ascii")


class TextEncoding:
    r"""How the text of one source is encoded.

    Args:
        encoding: Its name.
        errors: "strict", "replace" or "surrogatepass".
        universal: "\r\n" and "\r" are read as "\n".
        head: The text's first bytes, which may hold a byte order mark.

    Attributes:
        name: What the bytes behind the mark are encoded with.
        mark_bytes: Length of the byte order mark, which is no character.
        width: Every character begins at a multiple of so many bytes; 0 if that is not known.
    """

    def __init__(self, encoding: str, *, errors: str, universal: bool, head: bytes) -> None:
        name, mark = encoding_name(encoding), b""
        if name in ("utf-8", "utf-8-sig"):
            name, mark = "utf-8", codecs.BOM_UTF8
        elif name in ("utf-16", "utf-32"):
            little, big = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            if name == "utf-32":
                little, big = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
            order = "big" if head.startswith(big) else "little" if head.startswith(little) else sys.byteorder
            mark = big if order == "big" else little
            name += "-be" if order == "big" else "-le"
        self.name = name
        self.errors = errors
        self.universal = universal
        self.mark_bytes = len(mark) if head.startswith(mark) and errors != "surrogatepass" else 0
        self.width = _WIDTHS.get(name, int(_is_single_byte(name)))
        self.is_fixed = not universal and self.width == 1 and name != "utf-8"
        self._decoder = codecs.getincrementaldecoder(name)
        if self.width:
            self._cr = "\r".encode(name)
            self._lf = "\n".encode(name)

    def decoder(self) -> codecs.IncrementalDecoder:
        """A decoder at the begin of a text, newlines left as they are."""
        return self._decoder(self.errors)

    def newlines(self, text: str) -> str:
        """The text with the newlines it is to be read with."""
        if self.universal and "\r" in text:
            return text.replace("\r\n", "\n").replace("\r", "\n")
        return text

    def decode(self, data: bytes, *, final: bool = True) -> str:
        """The text between two boundaries.

        Args:
            data: Its bytes.
            final: False: the last character's bytes may be incomplete, and are left out.

        Raises:
            UnicodeDecodeError: They are invalid; its `start` counts from the first of them.
        """
        return self.newlines(self.decoder().decode(data, final))

    def ends_line(self, character: bytes) -> bool:
        """Whether a character, encoded, ends a line."""
        return character == self._lf or (self.universal and character == self._cr)

    def boundary(self, data: bytes, begin: int, offset: int) -> int:
        """The first offset at or behind `offset` where a character begins, or the end.

        Args:
            data: The text's bytes around it: `AHEAD_BYTES` behind it, if there are as many; from `BEHIND_BYTES`
                before it, or from another boundary before it.
            begin: Offset of `data`.
            offset: Offset in the text, at or behind `begin`.
        """
        width = self.width
        place = -(-max(offset, self.mark_bytes) // width) * width - begin
        if self.name == "utf-8":
            if _continues(data, place):
                for first in range(place - 1, max(place - 4, -1), -1):
                    if not _continues(data, first):
                        place = max(place, first + self._character_bytes(data[first : first + 4]))
                        break
        elif width == 2:
            first = place - 2
            high = data[first + (self.name == "utf-16-le")] if 0 <= first < len(data) - 1 else 0
            if high & 0xFC == 0xD8:  # the first half of a surrogate pair
                place = max(place, first + self._character_bytes(data[first : first + 4]))
        if self.universal and place >= width and data[place - width : place + width] == self._cr + self._lf:
            place += width
        return begin + min(place, len(data))

    def _character_bytes(self, data: bytes) -> int:
        """How many bytes the first character has, or what cannot be decoded and is replaced as one."""
        errors = "surrogatepass" if self.errors == "surrogatepass" else "strict"
        try:
            text = data.decode(self.name, errors)
        except UnicodeDecodeError as error:
            if not error.start:
                return error.end
            text = data[: error.start].decode(self.name, errors)
        return len(text[0].encode(self.name, errors))

    def codes(self, data: bytes, *, final: bool = True) -> Codes:
        """The code points of the text between two boundaries, as unsigned integers; otherwise as `decode`."""
        if self.name == "iso8859-1" or (_has_ascii(self.name) and data.isascii()):
            if self.universal and b"\r" in data:
                data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            return np.frombuffer(data, np.uint8)
        return self.codes_of(self.decode(data, final=final))

    @staticmethod
    def codes_of(text: str) -> Codes:
        """The code points of a text."""
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")

    def count(self, data: bytes) -> int:
        """How many characters there are between two boundaries; those behind an invalid byte are estimated."""
        if _has_ascii(self.name) and (self.errors != "replace" or data.isascii()):
            pairs = data.count(b"\r\n") if self.universal and b"\r" in data else 0
            if self.name != "utf-8" or data.isascii():
                return len(data) - pairs
            return int(np.count_nonzero(np.frombuffer(data, np.int8) >= -64)) - pairs  # all but 10xxxxxx
        try:
            return len(self.decode(data))
        except UnicodeDecodeError:
            return len(data)

    def offset_of(self, data: bytes, index: int) -> int:
        """At which of the bytes between two boundaries character `index` begins."""

        def complete(count: int) -> int:
            return len(self.decode(data[:count], final=False))

        place = bisect.bisect_left(range(len(data) + 1), index, key=complete)
        if self.universal and place and data[place - self.width : place + self.width] == self._cr + self._lf:
            place += self.width
        return place


def _continues(data: bytes, place: int) -> bool:
    """Whether there is a byte of UTF-8 that continues a character."""
    return 0 <= place < len(data) and data[place] & 0xC0 == 0x80
