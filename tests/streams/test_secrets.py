"""Text out of data and of URLs where people see it: no secrets, no control characters."""

import logging

import pytest
from file_server import serving
from helpers import make_loader
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset, stores, visualize
from stream_dataloader._engine import notices as _notices
from stream_dataloader._engine.html import preformatted
from stream_dataloader.cli.main import main
from stream_dataloader.errors import ReadError, StoreError, StreamError, shorten, shown, without_secrets
from stream_dataloader.streams import ArrayStream, FileCache

SECRETS = ("alice", "PASSWORD", "SIGNATURE")


def secret_url(server, name):
    return f"{server.url.replace('//', '//alice:PASSWORD@')}/{name}?X-Amz-Signature=SIGNATURE&b=2"


def has_secrets(text):
    return [secret for secret in SECRETS if secret in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:word@host:80/a/b.npy?key=1#x is gone", "https://host:80/a/b.npy?...#x is gone"),
        ("zip://a.npy::S3://me@bucket/b.zip?v=1", "zip://a.npy::S3://bucket/b.zip?..."),
        ("'http://h/a?b', 'http://u:p@h/c'", "'http://h/a?...', 'http://h/c'"),
        ("no url: a@b?c", "no url: a@b?c"),
    ],
)
def test_what_urls_hold_besides_the_address_is_left_out(text, expected):
    assert without_secrets(text) == expected
    assert shorten(text) == repr(expected) or "'" in text
    for kind in (StreamError, StoreError, ReadError):
        assert str(kind(text)) == expected


@given(st.text(st.characters(exclude_characters="\\"), max_size=30))
def test_what_is_shown_is_one_printable_line_from_which_the_text_can_be_read(text):
    line = shown(text)
    assert line.isprintable()
    if "://" not in text:
        assert line.encode("latin-1", "backslashreplace").decode("unicode_escape") == text


def test_neither_log_nor_errors_nor_packed_names_hold_a_password(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cache = FileCache(directory=tmp_path / "cache")
    with serving() as server:
        server.put("x.npy", b"no array")
        url = secret_url(server, "x.npy")
        cache.open(url).close()
        assert "fetching" in caplog.text
        with pytest.raises(StreamError) as failed:
            list(make_loader([url], ArrayStream(cache=cache), 1, time_steps=2))
        with pytest.raises(FileNotFoundError) as missing:
            cache.open(secret_url(server, "none.npy"))
    for text in (caplog.text, str(failed.value), failed.value.source, str(missing.value)):
        assert not has_secrets(text), text
    stores.pack(([url], lambda _: range(2)), tmp_path / "s.store")
    assert not has_secrets((tmp_path / "s.store" / "keys.bin").read_text())
    assert stores.open(tmp_path / "s.store").open_stream.key(0).endswith("/x.npy?...")


@pytest.mark.parametrize("same_host", [True, False])
def test_headers_for_one_host_do_not_follow_to_another(tmp_path, same_host):
    headers = {"Authorization": "Bearer KEY", "X-Api-Key": "KEY", "Cookie": "KEY"}
    cache = FileCache(directory=tmp_path, storage_options={"http": {"headers": headers}})
    with serving() as first, serving() as second:
        other = first if same_host else second
        other.put("b.npy", b"content")
        first.redirects["a.npy"] = f"{other.url}/b.npy"
        cache.open(f"{first.url}/a.npy").close()
        names = {name.lower() for name, value in other.headers_of["b.npy"] if "KEY" in value}
    assert names == ({"authorization", "x-api-key", "cookie"} if same_host else set())


URL = "https://alice:PASSWORD@host/a?X-Amz-Signature=SIGNATURE"


class Named:
    def __repr__(self):
        return f"<{URL} \x1b[2K>"


@pytest.mark.parametrize("item", [URL, f"\x1b[2K\n{URL}", {URL: 1}, [URL], {"a": [(URL,)]}, Named()], ids=repr)
def test_html_and_notes_show_no_secrets_and_no_control_characters(item, caplog):
    dataset = StreamDataset([1, 1], lambda n: iter([{"x": item, "y": 1}] * n), 2, time_steps=1)
    page = next(iter(StreamDataLoader(dataset)))._repr_html_()
    told = [page, preformatted(f"a\n{item!r}\n{item}"), str(StoreError(f"a\n{item}"))]
    with pytest.warns(RuntimeWarning) as warned:
        _notices.warn(f"it is {item}", 1)
    told += [str(warned[0].message), caplog.text]
    for text in told:
        assert not has_secrets(text), text
        assert "\x1b" not in text
    assert "host" in page
    assert "a\n" in told[1]


def test_pictures_show_names_as_they_are(tmp_path, fonts):
    drawn = visualize.timeline(StreamDataset([9, 9], range, 2, time_steps=4, lengths=[9, 9]))
    drawn.save(tmp_path / "a.svg", sources=["$\\frac{$", f"\x1b{URL}"])  # no formula of TeX
    text = (tmp_path / "a.svg").read_text()
    assert not has_secrets(text)
    assert "\x1b" not in text


def test_packing_tells_of_what_it_skips_in_a_line_each(tmp_path):
    def opened(name):
        if name:
            raise ValueError(f"no video {name}")
        return range(2)

    report = stores.pack(([f"\x1b\nskipped nothing {URL}", ""], opened), tmp_path / "a.store", on_error="skip")
    assert len(str(report).splitlines()) == 2
    assert "\x1b" not in str(report)
    assert not has_secrets(str(report))


@pytest.mark.parametrize("command", ["inspect", "profile", "verify"])
def test_names_in_data_cannot_write_to_the_terminal(tmp_path, command, capfdbinary):
    (tmp_path / "\x1b]0;title\x07\x1b[2K\nstream-dataloader: verified.mp4").write_text("no video")
    assert main([command, str(tmp_path)]) > 0
    told = b"".join(capfdbinary.readouterr())
    assert command == "verify" or b"mp4" in told
    assert b"\x1b" not in told
    assert b"\nstream-dataloader: verified" not in told
