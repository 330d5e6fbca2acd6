"""What notebooks show of a batch: small, well formed, and never an error, whatever the batch holds."""

import base64
import dataclasses
import html.parser
import re
import sys
import typing

import numpy as np
import pytest
import torch
from helpers import FULL

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset, visualize
from stream_dataloader._engine.html import LIMIT_BYTES


class Reader(html.parser.HTMLParser):
    """Reads HTML, and complains of tags that do not match and of what should have been escaped."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.images, self.rows = [], [], [], []

    def handle_starttag(self, tag, attributes):
        assert tag in {"div", "table", "tr", "th", "td", "img", "code", "b", "pre"}, tag
        assert {name for name, _ in attributes} <= {"style", "src", "alt", "cellpadding"}
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def read(batch):
    return parsed(batch._repr_html_())


def parsed(text):
    """What HTML says, once it was found to be small and well formed."""
    assert len(text.encode()) <= LIMIT_BYTES
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert all(source.startswith("data:image/png;base64,") for source in reader.images)
    return reader


def first_batch(open_stream, sources=(5, 3), time_steps=4, **options):
    dataset = StreamDataset(sources, open_stream, len(sources), time_steps=time_steps, **options)
    return next(iter(StreamDataLoader(dataset)))


def batch_of(data, time_steps=4, lanes=3, real=None):
    real = torch.ones(time_steps, lanes, dtype=torch.bool) if real is None else real
    return StreamBatch(
        data=data,
        reset=torch.zeros(lanes, dtype=torch.bool),
        is_first=torch.zeros(time_steps, lanes, dtype=torch.bool),
        mask=real,
        source_index=torch.where(real, 2**40, -1),
        position=torch.where(real, torch.arange(time_steps)[:, None], -1),
        worker_id=torch.zeros(lanes, dtype=torch.int64),
        lane=torch.arange(lanes),
        batch_index=0,
        epoch=0,
    )


def pixels(url):
    cv2 = pytest.importorskip("cv2")
    return cv2.imdecode(np.frombuffer(base64.b64decode(url.split(",")[1]), np.uint8), cv2.IMREAD_COLOR)


def test_it_has_a_row_for_each_lane():
    shown = read(first_batch(range, (6, 2), windows="aligned"))
    assert shown.rows == [
        ["lane", "worker", "source", "positions", "reset", "padding", "data"],
        ["0", "0", "0", "0 to 3", "yes", "", "0, 1, 2, 3"],
        ["1", "0", "1", "0 to 1", "yes", "2 of 4", "0, 1"],
    ]
    assert "step 0, epoch 0: 4 time steps of 2 lanes, 2 resets, 25% padding" in "".join(shown.texts)


def test_packed_windows_name_each_stream_and_what_is_read_again():
    _, first, *_ = read(first_batch(range, (2, 9), windows="packed", lookahead=0)).rows
    assert first[2:5] == ["0, 1", "0 to 1, 0 to 1", "yes"]
    dataset = StreamDataset([1, 1, 1, 1, 1, 9], range, 1, time_steps=6, windows="packed")
    _, row = read(next(iter(StreamDataLoader(dataset)))).rows
    assert row[2:4] == ["0, 1, 2, and 3 more", "0 to 0, 0 to 0, 0 to 0, and 3 more"]
    rows = read(first_batch(range, (1, 3), 3, padding_mode="data", windows="packed")).rows
    assert rows[2][5] == "3 read again"


@pytest.mark.parametrize("shape", [(3, 40, 60), (1, 40, 60), (4, 40, 60), (40, 60, 3), (40, 60)])
def test_pictures_are_shown(shape):
    pytest.importorskip("cv2")
    shown = read(first_batch(lambda n: (np.full(shape, 50 * t, np.uint8) for t in range(n))))
    assert len(shown.images) == 2
    four, three = map(pixels, shown.images)
    assert four.shape[1] / three.shape[1] == pytest.approx(4 / 3, abs=0.05)  # no picture of padding
    assert [int(four[5, int(four.shape[1] * (t + 0.5) / 4)].max()) for t in range(4)] == [0, 50, 100, 150]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 255), (-1, 1), (-2.5, 3000)])
def test_floats_are_scaled_to_what_they_look_like(dtype, low, high):
    picture = torch.full((3, 16, 16), float(low), dtype=dtype)
    picture[0, :, 8:] = high  # red
    picture[1, 0, 0] = torch.nan
    (url,) = read(batch_of(picture.expand(1, 1, 3, 16, 16), 1, 1)).images
    image = pixels(url)
    assert image[8, 12].tolist() == [0, 0, 255]
    assert image[8, 2].tolist() == [0, 0, 0]


def test_a_picture_of_noise_shrinks_until_it_fits():
    noise = torch.randint(0, 256, (8, 128, 3, 128, 128), dtype=torch.uint8)
    shown = read(batch_of({"a": noise, "b": noise.permute(0, 1, 3, 4, 2)}, 8, 128))
    assert len(shown.images) == 32
    assert "and 112 more lanes" in "".join(shown.texts)


def test_without_opencv_there_are_numbers(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    shown = read(first_batch(lambda n: (np.full((3, 16, 16), 7, np.uint8) for _ in range(n))))
    assert shown.images == []
    assert shown.rows[1][6] == "7, 7, 7, 7, 7, 7, …"


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
def test_all_is_escaped():
    evil = "<script>alert('&')</script>\u202e"

    class Evil:
        def __repr__(self):
            return evil

    Evil.__name__ = Evil.__qualname__ = evil
    item = {evil: Evil(), "text": evil, "sparse": torch.eye(2).to_sparse()}
    shown = read(first_batch(lambda n: (item for _ in range(n))))
    text = "".join(shown.texts)
    assert "<script>" in text
    assert "\u202e" not in text


def test_text_and_objects_are_shown_in_short():
    shown = read(first_batch(lambda n: iter("ab\ncd"[:n]), (5, 2)))
    assert [row[6] for row in shown.rows] == ["data", r"ab\nc", "ab"]
    shown = read(first_batch(lambda n: (f"word {i}" for i in range(n)), (5, 2)))
    assert shown.rows[1][6] == "word 0 · word 1 · word 2 · word 3"
    shown = read(first_batch(lambda n: ([i, {"a": "b" * 999}] for i in range(n)), (1, 1)))
    assert shown.rows[1][6].startswith("[0, {'a': 'bbb")
    shown = read(first_batch(lambda n: ([10**9999], Broken()) if n else (), (2, 1)))
    assert re.fullmatch("list · <Brok.*>", shown.rows[1][6])


def raising(*_):
    raise RuntimeError("no")


class Broken:
    __repr__ = __str__ = __len__ = __iter__ = keys = items = raising


class BrokenDict(dict):
    __repr__ = __str__ = __len__ = __iter__ = keys = items = raising


class BrokenString(str):
    __str__ = __repr__ = __len__ = __iter__ = __getitem__ = __format__ = raising


class Fields(typing.NamedTuple):
    picture: object
    label: object


#: What a lane may hold at a time step.
OBJECTS = [
    *("", "<", "&" * 100_000, "</td></table>", "\0", "\ud800" * 50, BrokenString("a"), Broken()),
    *(None, b"\xff", -1, 10**5000, [[], [1, [2]]], np.arange(999), torch.eye(3).to_sparse()),
]
DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
ODD = [np.nan, np.inf, -np.inf, 1e308, -300.0]


def odd_leaves(time_steps, lanes):
    """Leaves of all kinds: pictures, tensors of other shapes, lists of objects, and what is no leaf at all."""
    values = torch.linspace(-300, 300, time_steps * lanes * 65 * 8).view(time_steps, lanes, 1, 65, 8).double()
    values.view(-1)[: len(ODD)] = torch.tensor(ODD)
    for dtype in DTYPES:
        yield from (values.to(dtype), values[:, :, 0, 0].to(dtype), values[:, :, :, :0].to(dtype), values[0].to(dtype))
    yield values.nan_to_num(0, 255, 0).clamp(0, 255).byte()
    yield from ([[each] * lanes] * time_steps for each in OBJECTS)
    yield from OBJECTS


@pytest.mark.filterwarnings("ignore")  # of numbers that are out of range
@pytest.mark.parametrize(("time_steps", "lanes"), [(1, 1), (4, 2), (2, 17)])
def test_any_batch_is_shown(time_steps, lanes):
    leaves = list(odd_leaves(time_steps, lanes))[:: 1 if FULL else 3]
    cells = torch.arange(time_steps * lanes).view(time_steps, lanes)
    for leaf in leaves:
        for real in (cells >= 0, cells % 3 == 1, cells < 0):
            for data in (leaf, {"<": leaf, 3: leaves[0]}, Fields(leaf, (leaf,))):
                assert len(read(batch_of(data, time_steps, lanes, real)).rows) == 1 + min(16, lanes)
    assert len(read(batch_of(tuple(leaves), time_steps, lanes)).rows) == 1 + min(16, lanes)


def nested(depth):
    inner = torch.zeros(4, 3)
    for _ in range(depth):
        inner = {"a": inner}
    return inner


HOPELESS = {
    "a key that raises": {Broken: 1},
    "a dict that raises": BrokenDict(a=1),
    "text without end": [["<" * 10**6] * 3] * 4,
    "a name without end": {"<" * 10**6: torch.zeros(4, 3)},
    "thousands of leaves": {f"<{i}>": torch.zeros(4, 3, 3, 9, 9) for i in range(3000)},
    "nested too deep": nested(5000),
    "large pictures": torch.zeros(1, dtype=torch.uint8).expand(4, 3, 3, 20_000, 30_000),
    "narrow pictures": torch.zeros(4, 3, 3, 8, 90_000, dtype=torch.uint8),
    "no data": None,
    "meta": torch.zeros(4, 3, 3, 9, 9, device="meta"),
    "a gradient": torch.zeros(4, 3, 3, 9, 9, requires_grad=True),
}


@pytest.mark.parametrize("name", HOPELESS)
def test_hopeless_batches_are_shown(name):
    assert read(batch_of(HOPELESS[name])).texts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_of_a_batch_on_a_gpu():
    batch = first_batch(lambda n: ({"picture": np.full((3, 16, 16), 50, np.uint8), "t": t} for t in range(n)))
    assert batch.cuda()._repr_html_() == batch._repr_html_()


def test_books_are_shown_without_data_and_are_no_error_if_they_do_not_fit(caplog):
    caplog.set_level("DEBUG", "stream_dataloader")
    assert read(first_batch(range).to("meta")).rows[1][:4] == ["0", "0", "0", "0 to 3"]
    assert not caplog.records
    batch = dataclasses.replace(batch_of(torch.zeros(4, 3)), lane="no tensor", worker_id=None)
    assert "cannot be shown" in "".join(read(batch).texts)
    assert "cannot be shown as HTML" in caplog.text
    assert "AttributeError" in caplog.text


def test_what_a_loader_did_is_a_table():
    loader = StreamDataLoader(StreamDataset([3, 2], range, 2, time_steps=2))
    list(loader)
    head, row = read(loader.stats()).rows
    assert (head[0], head[-1]) == ("worker", "items")
    assert (row[0], row[-1]) == ("0", "5")


def test_a_timeline_is_a_picture_the_same_each_time_or_else_text(fonts, monkeypatch):
    timeline = visualize.timeline(StreamDataset([5, 2, 9], range, 2, time_steps=4, lengths=[5, 2, 9]))
    shown = timeline._repr_mimebundle_()
    assert re.match(r"<svg\b.*</svg>\s*$", shown["image/svg+xml"], re.DOTALL)
    assert timeline._repr_mimebundle_() == shown
    lengths = [1] * 2000
    many = visualize.timeline(StreamDataset(lengths, range, 2, time_steps=4, lengths=lengths))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for drawn in (many, timeline):
        assert len(repr(drawn)) < 200
        (text,) = drawn._repr_mimebundle_().values()
        assert "".join(parsed(text).texts) == drawn.text()
