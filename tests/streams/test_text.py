"""Texts: whatever the encoding, the newlines, the blocks and the sections, the units are those of a plain model."""

import bz2
import contextlib
import gzip
import itertools
import lzma
import os
import pickle
import re
import sys
import tracemalloc

import helpers
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from stream_dataloader.streams import TextStream
from stream_dataloader.testing import StreamContract

if sys.version_info >= (3, 14):
    from compression import zstd as zstandard
else:
    import zstandard

TEXT = "Ein Löffel,\r\nzwei\rdrei €uro 😀\n\nund ein Ende"


def universal(text):
    return text.replace("\r\n", "\n").replace("\r", "\n")


def numbers(stream):
    return list(map(int, helpers.read(stream)))


def agrees(stream, source, expected, start=0):
    """Whether the units are those expected, yielded and written, from the first on and from another."""
    if not expected:
        with pytest.raises(ValueError, match="is empty"):
            stream(source)
        return False
    start = min(start, len(expected))
    opened, found, out = stream(source, start=start), [], np.zeros(7, stream.dtype)
    while count := opened.read_into(out):
        found += out[:count].tolist()
    opened.close()
    assert numbers(stream(source)) == expected
    assert numbers(stream(source, start=start)) == found == expected[start:]
    return True


def lines_as_tokens(text):
    """A tokenizer whose tokens tell which pieces of text it was called with."""
    return [1000 + len(text), *map(ord, text)]


def word_tokenizer():
    model = tokenizers.models.WordLevel({"[UNK]": 0, "ein": 1, "Ende": 2, "und": 3, "[CLS]": 4}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 4)]
    )
    return tokenizer


@pytest.fixture
def path(tmp_path):
    def write(data, name="text.txt"):
        file = tmp_path / name
        file.write_bytes(data.encode() if isinstance(data, str) else data)
        return file

    return write


class TestFiles(StreamContract):
    @pytest.fixture(
        params=[
            {"units": "bytes"},
            {"units": "characters"},
            {"newlines": "keep", "targets": True, "dtype": "int32"},
            {"units": "tokens", "tokenizer": lines_as_tokens},
            {"tokenizer": word_tokenizer(), "targets": True},
        ],
        ids=["bytes", "characters", "characters-targets", "callable", "tokenizer"],
    )
    def open_stream(self, request):
        return TextStream(block_bytes=16, longest_line_bytes=16, **request.param)

    @pytest.fixture
    def sources(self, path):
        long, short = path(TEXT.encode()), path("é", "short.txt")
        packed = path(gzip.compress(TEXT.encode()), "a.txt.gz"), path(zstandard.compress(TEXT.encode()), "a.txt.zst")
        return [long, short, (long, 6, 20), (str(long), 20, None), (long, 7, 7), *packed]


class TestStrings(StreamContract):
    @pytest.fixture(params=["bytes", "characters"])
    def open_stream(self, request):
        return TextStream(of="strings", units=request.param, block_bytes=16)

    @pytest.fixture
    def sources(self):
        return [TEXT, "a", "\r\n"]


# -- against a plain model ---------------------------------------------------------------------------------------

REPLACED = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "cp037", "ascii")
FORWARD = ("shift_jis", "gb18030", "utf-7", "iso2022_jp", *REPLACED)
_letters = st.sampled_from("ab \n\r\0éß€😀\ufeff\U0010ffff日本") | st.characters(exclude_categories=["Cs"])
texts = st.text(_letters, min_size=1, max_size=120)
blocks = st.integers(16, 64)
newline_kinds = st.sampled_from(["universal", "keep"])


def model(data, encoding, errors, newlines):
    text = data.decode(encoding, {"raise": "strict"}.get(errors, errors))
    if encoding == "utf-8":
        text = text.removeprefix("\ufeff")
    return [ord(c) for c in (universal(text) if newlines == "universal" else text)]


junk = st.binary(max_size=3) | st.binary(max_size=9).map(lambda data: bytes(byte | 0x80 for byte in data))


cut_places = st.lists(st.integers(0, 500))


def cut_up(path, cuts):
    size = path.stat().st_size
    cuts = sorted({0, size, *(cut % (size + 1) for cut in cuts)})
    return [(path, first, stop) for first, stop in itertools.pairwise(cuts)]


@given(texts, st.sampled_from(["utf-8", "utf-8-sig"]), junk, cut_places, newline_kinds, blocks, st.data())
def test_characters_are_those_of_the_model(tmp_path_factory, text, encoding, junk, cuts, newlines, block, data):
    encoded = text.encode(encoding, "replace")
    place = data.draw(st.integers(0, len(encoded)))
    encoded = encoded[:place] + junk + encoded[place:]
    path = tmp_path_factory.getbasetemp() / "model.txt"
    path.write_bytes(encoded)
    stream = TextStream(encoding=encoding, errors="replace", newlines=newlines, block_bytes=block)
    expected = model(encoded, encoding, "replace", newlines)
    if not agrees(stream, path, expected, data.draw(st.integers(0, 500))):
        return
    sections = cut_up(path, cuts)
    assert [unit for section in sections for unit in numbers(stream(section))] == expected
    for section in sections:
        whole = numbers(stream(section))
        assert numbers(stream(section, start=len(whole) // 2)) == whole[len(whole) // 2 :]
        assert stream.length(section) in (None, len(whole))
    raw = TextStream(units="bytes", block_bytes=block)
    assert bytes(unit for section in sections for unit in numbers(raw(section))) == encoded


@given(texts, st.sampled_from(FORWARD), newline_kinds, blocks, st.data())
def test_encodings_that_are_read_forward(tmp_path_factory, text, encoding, newlines, block, data):
    text = text.translate(dict.fromkeys(b"\x0e\x0f\x1b"))  # which switch between sets of characters
    encoded, errors = text.encode(encoding, "ignore"), "raise"
    if encoding in REPLACED:
        place, errors = data.draw(st.integers(0, len(encoded))), "replace"
        encoded = encoded[:place] + data.draw(st.binary(max_size=3)) + encoded[place:]
    path = tmp_path_factory.getbasetemp() / "forward.txt"
    path.write_bytes(encoded)
    stream = TextStream(encoding=encoding, errors=errors, newlines=newlines, block_bytes=block)
    expected = model(encoded, encoding, errors, newlines)
    if not agrees(stream, path, expected, data.draw(st.integers(0, 500))):
        return
    tokens = TextStream(
        tokenizer=lines_as_tokens, encoding=encoding, errors=errors, newlines=newlines, longest_line_bytes=1000
    )
    lines = re.findall(r"[^\n]*\n|[^\n]+", "".join(map(chr, expected)))
    assert numbers(tokens(path)) == [token for line in lines for token in lines_as_tokens(line)]


@given(texts, newline_kinds, blocks, st.sampled_from(["gz", "zst"]), st.integers(0, 100))
def test_compressed_and_in_memory_the_same(tmp_path_factory, text, newlines, block, kind, start):
    encoded = text.encode()
    strings = TextStream(of="strings", newlines=newlines, block_bytes=block)
    assert agrees(strings, text, [ord(c) for c in (universal(text) if newlines == "universal" else text)], start)
    path = tmp_path_factory.getbasetemp() / f"packed.{kind}"
    compress = gzip.compress if kind == "gz" else zstandard.compress
    half = len(encoded) // 2
    path.write_bytes(compress(encoded[:half]) + compress(encoded[half:]))  # members, frames
    stream = TextStream(newlines=newlines, block_bytes=block)
    if agrees(stream, path, model(encoded, "utf-8", "raise", newlines), start):
        agrees(TextStream(units="bytes", block_bytes=block), path, list(encoded), start)


def test_members_may_be_shorter_than_a_byte_order_mark(path):
    members = (b"\xef\xbb", b"\xbf", b"a", b"b\r", b"\nc")
    assert numbers(TextStream()(path(b"".join(map(gzip.compress, members)), "a.gz"))) == list(map(ord, "ab\nc"))


def test_strings_may_hold_half_a_character():
    text = "a\ud800\udc00b\r\n" * 9  # which utf-8 has no bytes for
    stream = TextStream(of="strings", block_bytes=16)
    agrees(stream, text, [ord(c) for c in universal(text)], 7)
    for wrong, message in ((text, "surrogates not allowed"), ("", "is empty")):
        with pytest.raises(ValueError, match=message):
            TextStream(of="strings", units="bytes")(wrong)


def pieces_of(text, size):
    """The pieces that tokens are made of, each with the byte it begins at: the rule, for UTF-8, spelled out."""
    characters = re.findall("\r\n|(?s:.)", text)
    begins, place = [], 0
    for character in characters:
        begins.append(place)
        place += len(character.encode())
    characters = ["\n" if c in ("\r\n", "\r") else c for c in characters]
    starts = {0}
    for block in range(place // size + 1):
        inside = [i for i, begin in enumerate(begins) if begin // size == block]
        lines = {i for i in inside if i == 0 or characters[i - 1] == "\n"}
        if inside and not lines:
            lines = {next((i for i in inside if characters[i] == " "), inside[0])}
        starts |= lines
    cuts = [*sorted(starts), len(characters)]
    return [("".join(characters[a:b]), begins[a]) for a, b in itertools.pairwise(cuts)]


@example("é" * 60, 17, [], 0)  # characters lie across the ends of blocks
@given(texts.filter(lambda text: text[0] != "\ufeff"), st.integers(16, 50), cut_places, st.integers(0, 999))
def test_tokens_are_those_of_the_pieces(tmp_path_factory, text, size, cuts, start):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    stream = TextStream(tokenizer=lines_as_tokens, longest_line_bytes=size)
    pieces = pieces_of(text, size)
    expected = [token for piece, _ in pieces for token in lines_as_tokens(piece)]
    agrees(stream, path, expected, start)
    for section in cut_up(path, cuts):
        _, first, stop = section
        tokens = [token for piece, at in pieces if first <= at < stop for token in lines_as_tokens(piece)]
        assert numbers(stream(section)) == tokens


@given(st.text(min_size=1, max_size=50), st.integers(1, 9), st.integers(0, 50))
def test_targets_are_the_next_units(text, room, start):
    stream = TextStream(of="strings", targets=True, block_bytes=16, newlines="keep")
    units = [ord(c) for c in text]
    start = min(start, len(units))
    expected = list(zip(units, [*units[1:], -100], strict=True))[start:]
    items = helpers.read(stream(text, start=start))
    assert [(int(item["input"]), int(item["target"])) for item in items] == expected
    assert stream.length(text) == len(units)
    opened, count = stream(text, start=start), min(room, len(items))
    out = {"input": np.zeros(room, np.int64), "target": np.zeros(room, np.int64)}
    assert opened.read_into(out) == count
    assert list(zip(out["input"][:count], out["target"][:count], strict=True)) == expected[:count]


def test_a_tokenizer_of_the_tokenizers_package(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=10)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    text = "ein und ein\nEnde x und"
    for given_tokenizer in (tokenizer, file, str(file)):
        stream = TextStream(of="strings", tokenizer=given_tokenizer)
        assert numbers(stream(text)) == [1, 3, 1, 2, 0, 3]  # nothing cut off, nothing added
        assert numbers(pickle.loads(pickle.dumps(stream))(text)) == [1, 3, 1, 2, 0, 3]
    assert tokenizer.truncation["max_length"] == 2  # the user's own is left alone
    assert stream.length(text) is None


def test_vocabularies(path):
    file = path("abba")
    assert numbers(TextStream(vocabulary="ab")(file)) == [0, 1, 1, 0]
    assert numbers(TextStream(vocabulary={"a": 7}, unknown=3, dtype="uint8")(file)) == [7, 3, 3, 7]
    assert next(iter(TextStream(vocabulary="ab", dtype="uint8", of="strings")("a"))).dtype == np.uint8


def test_bytes_are_sought_without_reading(path, monkeypatch):
    counted, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, offset: (counted.append(count), pread(file, count, offset))[1])
    file, stream = path(b"\xe9" * 3_000_000), TextStream(units="bytes")
    assert numbers(stream(file, start=2_999_998)) == [0xE9] * 2
    assert stream.length((file, 5, 2_000_000)) == 1_999_995
    assert sum(counted) < 400


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["txt", "gz", "zst"])
@pytest.mark.parametrize(
    "options", [{"units": "bytes"}, {}, {"tokenizer": lambda text: [len(text)]}], ids=["bytes", "characters", "tokens"]
)
def test_a_giant_line_costs_no_memory(tmp_path, options, suffix):
    file, megabytes, stream = tmp_path / f"giant.{suffix}", 100, TextStream(**options)
    with {"txt": open, "gz": gzip.open, "zst": zstandard.open}[suffix](file, "wb") as out:
        for _ in range(megabytes):
            out.write(bytes(1_000_000))
    units, total = np.zeros(65536, stream.dtype), 0
    tracemalloc.start()
    try:
        for source in (file, (file, 90_000_000, None))[: 1 + (suffix == "txt")]:
            opened = stream(source)
            while count := opened.read_into(units):
                total += int(units[:count].sum()) if "tokenizer" in options else count
            opened.close()
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()
    # Of tokens, the part that the section begins in belongs to the section before.
    section = 10_000_000 if "tokenizer" not in options else 100_000_000 - -(-90_000_000 // 65536) * 65536
    assert total == megabytes * 1_000_000 + section * (suffix == "txt")


def whole(stream):
    """Items before an error, and the error, which comes again."""
    found, out = [], np.zeros(1000, np.int64)
    with pytest.raises((ValueError, OSError)) as caught:  # noqa: PT012
        while count := stream.read_into(out):
            found.extend(out[:count].tolist())
    with pytest.raises(caught.type, match=re.escape(str(caught.value))):
        stream.read_into(out)
    stream.close()
    return found, str(caught.value)


@pytest.mark.one_of_each
@pytest.mark.parametrize("block", [16, 17, 18, 19, 64])
@pytest.mark.parametrize(
    ("data", "encoding", "place"),
    [
        (b"a" * 30 + b"\xff" + b"b" * 30, "utf-8", 30),
        (b"a" * 15 + b"\xe2\x82" + b"b" * 30, "utf-8", 15),
        (b"a" * 20 + b"\xe2\x82", "utf-8", 20),
        (b"\xef\xbb\xbf" + b"a" * 13 + b"\x80" + b"a" * 40, "utf-8", 16),
        ("é".encode() * 20 + b"\xed\xa0\x80", "utf-8", 40),
        ("€\r\n".encode("utf-16") * 9 + b"\x00\xdc", "utf-16", 72),
        (b"a\0" * 10 + b"a", "utf-16-le", 20),
        (b"a" * 40 + b"\x81" + b"b" * 9, "cp1252", 40),
        (b"a" * 40 + b"\xe9", "ascii", 40),
        ("日本".encode("shift_jis") * 9 + b"\xff", "shift_jis", 36),
        ("日本".encode("shift_jis") * 9 + b"\x96", "shift_jis", 36),
    ],
)
def test_invalid_bytes_are_told_by_their_offset(path, data, encoding, place, block):
    file = path(data)
    found, message = whole(TextStream(encoding=encoding, block_bytes=block)(file))
    valid = data[:place].decode(encoding)
    assert found == [ord(c) for c in universal(valid.removeprefix("\ufeff") if encoding == "utf-8" else valid)]
    assert f"{file} is not valid {encoding} at byte {place} (" in message
    # opened again where it broke, it breaks again
    stream = TextStream(encoding=encoding, block_bytes=block)
    assert whole(stream(file, start=len(found))) == ([], message)
    assert numbers(TextStream(encoding=encoding, block_bytes=block, errors="replace")(file))[: len(found)] == found
    found, message = whole(TextStream(tokenizer=lines_as_tokens, encoding=encoding, longest_line_bytes=block)(file))
    assert f"at byte {place} (" in message


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        (bz2.compress, "compressed by bzip2: unpack it once"),
        (lzma.compress, "compressed by xz: unpack it once"),
        (gzip.compress, "compressed by gzip: give it the suffix .gz"),
        (lambda data: data.decode().encode("utf-16"), "mark utf-16: give encoding='utf-16'"),
        (lambda data: data.decode().encode("utf-32"), "mark utf-32: give encoding='utf-32'"),
    ],
)
def test_files_that_are_no_utf_8_by_their_first_bytes_are_told_the_way(tmp_path, made, remedy):
    (tmp_path / "a.txt").write_bytes(made(b"some text " * 20))
    stream = TextStream(units="characters")(tmp_path / "a.txt")
    with contextlib.closing(stream), pytest.raises(ValueError, match=f"is not valid utf-8 .*{remedy}"):
        list(stream)


def test_invalid_bytes_in_sections_belong_to_one(path):
    file = path("é".encode() + b"\x80\x80" + b"abc")
    replaced = TextStream(errors="replace")
    assert numbers(replaced((file, 0, 3))) == [0xE9, 0xFFFD, 0xFFFD]  # what continues no character goes with it
    assert numbers(replaced((file, 3, 5))) == [ord("a")]
    assert numbers(TextStream()((file, 4, 5))) == [ord("a")]
    with pytest.raises(ValueError, match="at byte 2"):
        numbers(TextStream()((file, 0, 2)))


@pytest.mark.parametrize("errors", ["raise", "replace"])
def test_a_character_that_is_cut_with_its_file_is_left_out(path, errors):
    codes = np.random.default_rng(0).integers(0x4E00, 0x9000, 5000).tolist()  # of three bytes each
    packed = gzip.compress("".join(map(chr, codes)).encode())
    for end in range(-16, -12):
        found, message = whole(TextStream(errors=errors)(path(packed[:end], f"{-end}.gz")))
        assert found == codes[: len(found)]
        assert "cannot be decompressed" in message


def zstd_frame(described, rest):
    """A frame that holds "abc" as it is (RFC 8878, section 3.1.1)."""
    return b"\x28\xb5\x2f\xfd" + bytes([described]) + rest + b"\x19\0\0abc"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (zstd_frame(0, bytes([17 << 3])), None),  # 128 MiB
        (zstd_frame(0, bytes([17 << 3 | 1])), "its window is 150,994,944 bytes, .*--long=28"),
        (zstd_frame(0, bytes([21 << 3])), "its window is 2,147,483,648 bytes, .*--long=31"),
        (zstd_frame(3, b"\x58\7\1\0\0"), "dictionary 263, .*zstd -d -D"),
        (zstd_frame(0x21, b"\x09\3"), "dictionary 9, .*zstd -d -D"),
        (zstd_frame(0, b"\x58")[:-2], "damaged or was cut short"),
    ],
)
def test_a_zstd_frame_that_needs_more_says_what(path, frame, message):
    file = path(zstd_frame(0, b"\x58") + frame, "a.zst")
    stream = TextStream(units="bytes")(file)
    if message is None:
        assert bytes(map(int, stream)) == b"abcabc"
        return
    with pytest.raises(ValueError, match=rf"a\.zst .*{message}"):
        list(stream)


@pytest.mark.parametrize("units", ["bytes", "characters", "tokens"])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_cut_short_or_damaged_while_compressed(path, units, suffix):
    text = "".join(f"{i * i} é\n" for i in range(30_000))
    packed = (gzip if suffix == "gz" else zstandard).compress(text.encode())
    stream = TextStream(units=units, tokenizer=(lambda text: [*map(ord, text)]) if units == "tokens" else None)
    expected = list(text.encode()) if units == "bytes" else [ord(c) for c in text]
    for name, data in (
        ("short", packed[: len(packed) // 2]),
        ("almost", packed[:-1]),
        ("damaged", packed[: len(packed) // 2] + bytes(200) + packed[len(packed) // 2 + 200 :]),
        ("header", packed[:7]),
        ("other", b"this is not compressed at all"),
    ):
        file = path(data, f"{name}.{suffix}")
        try:
            found, message = whole(stream(file))
        except ValueError as error:
            found, message = [], str(error)
            assert name in ("header", "other")
        assert str(file) in message
        if name == "damaged" and suffix == "gz":  # its checksum is at the end
            continue
        assert found == expected[: len(found)]
        assert len(found) > 10_000 or name in ("header", "other", "damaged")


def test_no_text(path):
    packed = {"no.gz": gzip.compress(b""), "no.zst": zstandard.compress(b"")}
    for name, data in (packed | {"mark.txt": b"\xef\xbb\xbf"}).items():
        with pytest.raises(ValueError, match=f"{name} is empty"):
            TextStream()(path(data, name))


@pytest.mark.parametrize("options", [{"units": "bytes"}, {}, {"tokenizer": lines_as_tokens}])
def test_a_file_that_shrinks_or_breaks_while_it_is_read(path, options, monkeypatch):
    file = path("abc é\n" * 20)
    opened = TextStream(block_bytes=16, longest_line_bytes=16, **options)(file)
    assert next(iter(opened))
    os.truncate(file, 61)  # in the middle of a character
    found, message = whole(opened)
    assert f"{file} ends at byte 61, and had 140 bytes when it was opened" in message
    assert len(found) > 20
    file.write_bytes(b"abc\n" * 20)
    opened = TextStream(block_bytes=16, longest_line_bytes=16, **options)(file)
    assert next(iter(opened))

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    assert f"{file} could not be read at byte" in whole(opened)[1]


def test_starts_and_sections_that_are_not_there(path):
    file, packed = path("né\r\n"), path(gzip.compress(b"abc"), "a.gz")
    for options, source, start in (
        ({}, file, 4),
        ({"units": "bytes"}, file, 6),
        ({"units": "bytes"}, packed, 4),
        ({"tokenizer": lines_as_tokens}, file, 5),
        ({"encoding": "latin-1", "newlines": "keep"}, file, 6),
        ({"targets": True}, file, 4),
    ):
        with pytest.raises(ValueError, match=f"start is {start}"):
            TextStream(**options)(source, start=start)
    forward = {"encoding": "shift_jis"}, {"tokenizer": lines_as_tokens, "encoding": "gb18030"}
    sections = *(((file, *section), {}) for section in ((6, None), (0, 6))), ((packed, 0, 2), {})
    for source, options in (*sections, *(((file, 1, 2), options) for options in forward)):
        with pytest.raises(ValueError, match=str(source[0])):
            TextStream(**options)(source)
    for source, options in ((5, {}), (("abc", 0, 1), {"of": "strings"}), ((file, 0.5, None), {})):
        with pytest.raises(TypeError):
            TextStream(**options)(source)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_a_tokenizer_may_use_its_array_again(path, dtype):
    buffer = np.zeros(1, np.int64)

    def tokenize(text):
        buffer[0] = len(text)
        return buffer

    assert numbers(TextStream(tokenizer=tokenize, dtype=dtype)(path("a\nbcd\nef"))) == [2, 4, 2]


@pytest.mark.parametrize("made", [["e", "e"], [0.5], [[1, 2], [3]], [True], None, [2**80], [300], KeyError("e e")])
def test_tokenizers_that_fail(path, made):
    def tokenize(text):
        if text != "é\n" and isinstance(made, KeyError):
            raise made
        return [1] if text == "é\n" else made

    file = path("é\r\ne e\n")
    found, text = whole(TextStream(tokenizer=tokenize, dtype="uint8")(file))
    assert found == [1]
    assert f"{file}: the tokenizer failed on the 4 characters from byte 4 on: " in text


def test_characters_that_have_no_number(path):
    file = path("aé\r\nb€c")
    found, message = whole(TextStream(vocabulary="aé\nb", block_bytes=16)(file))
    assert found == [0, 1, 2, 3]
    assert message.startswith(f"{file} has '€' (U+20AC) at byte 6, ")
    found, message = whole(TextStream(dtype="uint8")(file))
    assert found == [*b"a\xe9\nb"]
    assert "(U+20AC) at byte 6" in message
    file = path(b"a" * 20 + b"\xe2\x82\xac" + b"b\xff")
    assert "(U+20AC) at byte 20" in whole(TextStream(vocabulary="ab")(file))[1]
    with pytest.raises(ValueError, match="'ascii' codec can't encode character"):
        TextStream(of="strings", units="bytes", encoding="ascii")("aé")


def test_a_pattern_in_place_of_a_file_and_a_name_in_place_of_a_tokenizer_are_told_the_way(path):
    with pytest.raises(FileNotFoundError, match=r"notes \[1\]\*\.txt.*sorted\(glob"):
        TextStream()("notes [1]*.txt")
    with pytest.raises(FileNotFoundError, match="reads texts themselves"):
        TextStream()("Once upon a time")
    with pytest.raises(FileNotFoundError, match="from_pretrained"):
        TextStream(tokenizer="gpt2")


def test_packages_and_tokenizers_that_are_missing_are_named(path, monkeypatch):
    stream = TextStream(tokenizer=path("{}", "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        stream(path("abc"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="text"):
        stream(path("abc"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    if sys.version_info < (3, 14):
        with pytest.raises(ImportError, match="zstd"):
            TextStream()(path(b"abc", "a.zst"))
