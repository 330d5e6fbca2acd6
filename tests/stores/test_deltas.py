"""`deltas=`: windows of their own for some entries of a store's items."""

import itertools
from contextlib import closing

import numpy as np
import pytest
import torch
from lerobot_data import write_v3
from small_stores import SMALL
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.testing._items import items_of
from stream_dataloader.testing.resume import batch_key

#: Entries of each format's small store, and their windows; one goes far outside of all streams.
CASES = {
    "memmap": {"image": (-1, 0), "pose": range(3)},
    "lmdb": {"image": (2, -2), "label": (99,)},
    "mds": {"label": (-3, 0, 1), "pose": range(2)},
    "demos.hdf5": {"actions": range(4), "obs/pose": (-2, -1, 0)},
    "hdf5": {"obs": (-1, 0)},
    "checked.hdf5": {"obs/image": (-1, 0), "obs/pose": (-99, 0), "actions": (0,), "dones": (1,)},
    "npy-folders": {"actions": range(20)},
    "tensordict": {"action": (-1, 0, 1)},
    "plain.parquet": {"state": (-1, 0)},
    "webdataset": {"cls": (-1, 0, 5)},
    "lerobot": {"action": range(6), "observation.state": (-2, -1, 0)},
}


def windowed(items, deltas):
    """The items as LeRobot's `delta_timestamps` would have them."""

    def cut(t, rows, name, window):
        places = [min(max(t + step, 0), len(rows) - 1) for step in window]
        if isinstance(rows[0][name], (dict, tuple)):
            cells = [row[name] for row in rows]
            keys = cells[0] if isinstance(cells[0], dict) else range(len(cells[0]))
            cut_cells = {key: cut(t, cells, key, window)[0] for key in keys}
            found = cut_cells if isinstance(cells[0], dict) else tuple(cut_cells.values())
        else:
            stack = torch.stack if isinstance(rows[0][name], torch.Tensor) else np.stack
            found = stack([rows[place][name] for place in places])
        return found, np.array([place != t + step for place, step in zip(places, window, strict=True)])

    found = []
    for t, item in enumerate(items):
        copy = {key: dict(below) if isinstance(below, dict) else below for key, below in item.items()}
        for path, window in deltas.items():
            *above, name = path.split("/")
            level, rows = copy, items
            for key in above:
                level, rows = level[key], [row[key] for row in rows]
            level[name], level[f"{name}_is_pad"] = cut(t, rows, name, window)
        found.append(copy)
    return found


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    small = SMALL[request.param]
    path = str(tmp_path / request.param)
    small.make(path, 0)
    return path, dict(small.options), CASES[request.param]


def test_each_item_has_its_windows(case):
    path, options, deltas = case
    _, plain = stores.open(path, **options)
    sources, opened = stores.open(path, deltas=deltas, **options)
    for number in sources:
        expected = windowed(items_of(plain(number)), deltas)
        start = min(3, len(expected))
        assert batch_key(items_of(opened(number))) == batch_key(expected)
        assert batch_key(items_of(opened(number, start=start))) == batch_key(expected[start:])


def test_batches_have_the_windows_of_items(case):
    path, options, deltas = case
    _, plain = stores.open(path, **options)
    sources, opened = stores.open(path, deltas=deltas, **options)
    expected = [windowed(items_of(plain(number)), deltas) for number in sources]
    lengths = [len(items) for items in expected]
    model = StreamDataset(list(sources), expected.__getitem__, 2, time_steps=3, lengths=lengths)
    loader = StreamDataLoader(StreamDataset(sources, opened, 2, time_steps=3))
    for batch, other in zip(loader, StreamDataLoader(model), strict=True):
        assert batch_key(batch) == batch_key(other)


@pytest.mark.parametrize("windows", [True, False])
def test_a_stream_goes_wherever_it_is_sought(case, windows):
    """Back, on, and to its end, item by item or several at once: what comes is what a new stream gives."""
    path, options, deltas = case
    sources, opened = stores.open(path, **({"deltas": deltas} if windows else {}), **options)
    rng = np.random.default_rng(0)
    for number in sources:
        expected = items_of(opened(number))
        with closing(opened(number)) as stream:
            for _ in range(12):
                place, count = rng.integers(0, len(expected) + 1), rng.integers(1, 5)
                stream.seek_item(place)
                found = items_of(itertools.islice(stream, count))
                assert batch_key(found) == batch_key(expected[place : place + count]), f"{number}: {count} from {place}"


class TestContract(StoreTests):
    num_workers = (0,)
    damages = 5

    @pytest.fixture(params=["memmap", "demos.hdf5"])
    def name(self, request):
        return request.param

    @pytest.fixture
    def path(self, name, tmp_path):
        SMALL[name].make(str(tmp_path / name), 0)
        return str(tmp_path / name)

    @pytest.fixture
    def made(self, path, name):
        return stores.open(path, deltas=CASES[name]).open_stream

    @pytest.fixture
    def expected(self, path, name):
        sources, store = stores.open(path)
        return [windowed(items_of(store(number)), CASES[name]) for number in sources]


def test_steps_are_read_once(tmp_path, monkeypatch):
    SMALL["npy-folders"].make(str(tmp_path / "s"), 0)
    _, opened = stores.open(tmp_path / "s", deltas={"actions": range(-2, 5)})
    read = []
    from stream_dataloader.stores._base.rows import RowSteps

    whole = RowSteps.read
    monkeypatch.setattr(RowSteps, "read", lambda self, start, out: (read.append((start, out)), whole(self, start, out)))
    list(StreamDataLoader(StreamDataset([3], opened, 1, time_steps=4)))
    steps = [
        step for start, out in read if list(out) == ["actions"] for step in range(start, start + len(out["actions"]))
    ]
    assert steps == list(range(opened.length(3)))


def test_cameras_have_windows_too(tmp_path):
    write_v3(tmp_path / "robot", (7, 4), cameras=("observation.images.top",))
    deltas = {"observation.images.top": (-1, 0), "action": range(3)}
    _, plain = stores.open(tmp_path / "robot")
    sources, opened = stores.open(tmp_path / "robot", deltas=deltas)
    assert opened.tasks == plain.tasks
    for number in sources:
        assert batch_key(items_of(opened(number))) == batch_key(windowed(items_of(plain(number)), deltas))


@pytest.mark.parametrize(
    ("deltas", "kind"),
    [
        ({"nothing": (0,)}, StoreError),
        ({"task": (0,)}, StoreError),
        ({"action": ()}, ValueError),
        ({"action": (0.1,)}, TypeError),
        ({"action": 3}, TypeError),
    ],
)
def test_wrong_windows_are_refused(deltas, kind, tmp_path):
    SMALL["lerobot"].make(str(tmp_path / "robot"), 0)
    with pytest.raises(kind, match=next(iter(deltas))):
        stores.open(tmp_path / "robot", deltas=deltas)


def test_items_that_are_no_dicts_are_refused(tmp_path):
    SMALL["npy"].make(str(tmp_path / "arrays"), 0)
    with pytest.raises(StoreError, match="are not dicts"):
        stores.open(tmp_path / "arrays", deltas={"x": (0,)})
