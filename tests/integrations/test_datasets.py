"""Hugging Face's `datasets`, the real package: its objects are stores, and give what iterating them gives."""

import importlib.util
import itertools
import re
from types import MappingProxyType

import numpy as np
import pytest
import torch
import tqdm
from helpers import ROOT, run_program
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.testing import check_resume
from stream_dataloader.testing.resume import batch_key

pytestmark = [
    pytest.mark.slow,  # to import datasets takes seconds
    pytest.mark.filterwarnings("ignore"),  # warnings are theirs
    pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets"),
]

EPISODES = np.repeat([4, 7, 5, 9], [11, 3, 8, 30])
TOKENS = [[5, 6, 7], [], [1], list(range(40)), [9, 9], [8] * 12]


@pytest.fixture(scope="module", autouse=True)
def _no_bars():
    """Else a thread of theirs is left behind."""
    import datasets

    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm.tqdm, "monitor_interval", 0)
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A dataset of two files, which are mapped."""
    from datasets import Array2D, ClassLabel, Features, Image, List, Value, load_from_disk
    from datasets import Dataset as Rows

    count = len(EPISODES)
    columns = {
        "episode": EPISODES,
        "label": np.arange(count) % 2,
        "state": np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32),
        "grid": np.arange(count * 6, dtype=np.float32).reshape(-1, 2, 3),
        "view": {"image": [np.full((4, 5, 3), n, np.uint8) for n in range(count)]},
    }
    columns["view"] = [{"image": image} for image in columns["view"]["image"]]
    features = {
        "episode": Value("int32"),
        "label": ClassLabel(names=["a", "b"]),
        "state": List(Value("float32"), length=3),
        "grid": Array2D((2, 3), "float32"),
        "view": {"image": Image()},
    }
    path = tmp_path_factory.mktemp("rows")
    Rows.from_dict(columns, Features(features)).save_to_disk(path, num_shards=2)
    return load_from_disk(path)


def items_of(dataset):
    """What iterating gives, as items are."""
    return [
        {
            "episode": np.int32(row["episode"]),
            "label": np.int64(row["label"]),
            "state": np.array(row["state"], np.float32),
            "grid": np.array(row["grid"], np.float32),
            "view": {"image": np.asarray(row["view"]["image"]).transpose(2, 0, 1).copy()},
        }
        for row in dataset
    ]


def episodes_of(dataset):
    items = items_of(dataset)
    keys = dict.fromkeys(int(item["episode"]) for item in items)
    return [[item for item in items if item["episode"] == key] for key in keys]


class DatasetContract(StoreTests):
    @pytest.fixture
    def made(self, given):
        return stores.open(given, **self.options).open_stream

    def test_is_found(self, given, made, expected):
        opened = stores.open(given, format="parquet", **self.options).open_stream
        assert type(opened) is type(made)
        assert opened.sources.fingerprint == made.sources.fingerprint


class TestDataset(DatasetContract):
    options = MappingProxyType({"stream": "episode"})

    @pytest.fixture(scope="class")
    def given(self, rows):
        return rows

    @pytest.fixture(scope="class")
    def expected(self, given):
        return episodes_of(given)


class TestSelectedDataset(TestDataset):
    @pytest.fixture(scope="class")
    def given(self, rows):
        chosen = np.random.default_rng(1).permutation(40)
        return rows.select(chosen).sort("episode").with_format("torch")

    @pytest.fixture(scope="class")
    def expected(self, given):
        return episodes_of(given.with_format(None))


class TestIterableDataset(DatasetContract):
    options = MappingProxyType({})

    @pytest.fixture(scope="class")
    def given(self, rows):
        return rows.to_iterable_dataset(num_shards=3)

    @pytest.fixture(scope="class")
    def expected(self, given):
        return [items_of(given.shard(3, number)) for number in range(3)]

    def test_gives_one_item_by_its_place(self, open_stream):
        """Shards are read forward only."""
        with pytest.raises(StoreError, match=r"no random access, for item\(\)"):
            open_stream.item(0, 1)


class TestShuffledIterableDataset(TestIterableDataset):
    @pytest.fixture(scope="class")
    def given(self, rows):
        return rows.to_iterable_dataset(num_shards=3).shuffle(seed=0, buffer_size=8)


def tokens_of(split="train"):
    from datasets import Dataset as Rows

    return Rows.from_dict({"ids": TOKENS, "text": ["a"] * len(TOKENS)}, split=split)


def doubled(row):
    return {"ids": [2 * token for token in row["ids"]]}


def forward():
    return tokens_of().to_iterable_dataset(num_shards=2)


KINDS = {"rows": tokens_of, "shards": forward, "mapped": lambda: forward().map(doubled)}


def loader_of(kind, workers, context="fork"):
    sources, store = stores.open(KINDS[kind](), elements=True, targets=True, columns=["ids"])
    dataset = StreamDataset(sources, store, 2, time_steps=9, windows="packed", fill_value={"target": -1})
    return StreamDataLoader(dataset, workers, multiprocessing_context=context if workers else None)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_tokens_are_sequences(kind):
    expected = [batch_key(batch) for batch in loader_of(kind, 0)]
    for context in ("fork", "spawn"):
        assert [batch_key(batch) for batch in loader_of(kind, 2, context)] == expected
    found = {}
    for batch in loader_of(kind, 0):
        for at in batch.mask.T.nonzero().tolist():
            lane, step = at
            key = batch.source_index[step, lane].item(), batch.position[step, lane].item()
            found[key] = batch.is_first[step, lane].item(), batch.data["input"][step, lane].item()
    ordered = [found[key] for key in sorted(found)]
    rows = [[(1 + (kind == "mapped")) * token for token in row] for row in TOKENS if row]
    assert ordered == [(at == 0, token) for row in rows for at, token in enumerate(row)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_tokens_resume(kind):
    check_resume(lambda workers: loader_of(kind, workers), epochs=1)


def test_targets_follow_each_token_of_a_row():
    for given in (tokens_of(), forward()):
        sources, store = stores.open(given, elements=True, targets=True, ignore_index=-1, columns=["ids"])
        found = [(int(item["input"]), int(item["target"])) for number in sources for item in store(number)]
        assert found == [pair for row in TOKENS if row for pair in zip(row, [*row[1:], -1], strict=True)]
    more = tokens_of().add_column("more", TOKENS)
    with pytest.raises(StoreError, match="one column"):
        next(stores.open(more, elements=True, targets=True, columns=["ids", "more"]).open_stream(0))


def test_a_column_marks_where_sequences_begin_in_a_shard(rows):
    sources, store = stores.open(rows.to_iterable_dataset(num_shards=2), stream="episode", columns=["state"])
    loader = StreamDataLoader(StreamDataset(sources, store, 1, time_steps=52, windows="packed"))
    (batch,) = loader
    begins = [0, *(1 + np.flatnonzero(np.diff(EPISODES))), 26]
    assert batch.is_first[:, 0].nonzero()[:, 0].tolist() == sorted(begins)
    assert torch.equal(batch.data["state"][:, 0], torch.tensor(rows["state"][:]))


@pytest.mark.parametrize(("source", "start"), [((0, -1, None), 0), (0, -1), ((0, 5, 3), 0), ((0, 1, 3), 4)])
def test_a_part_that_a_shard_cannot_have_is_an_error(source, start):
    with pytest.raises(ValueError, match=r"start is|IterableDataset, stream 0"):
        stores.open(forward(), columns=["text"]).open_stream(source, start=start)


def test_a_loader_of_shards_resumes_with_another_number_of_workers(rows):
    def loader(workers):
        opened = stores.open(rows.to_iterable_dataset(num_shards=3).shuffle(seed=0, buffer_size=8), columns=["state"])
        return StreamDataLoader(StreamDataset(*opened, 2, time_steps=6), workers)

    check_resume(loader, epochs=1)


def test_a_split_is_named(tmp_path):
    from datasets import DatasetDict, IterableDatasetDict

    given = DatasetDict(train=tokens_of(), test=tokens_of("test").select([3, 4]))
    given.save_to_disk(tmp_path / "saved")
    forward = IterableDatasetDict({name: one.to_iterable_dataset(2) for name, one in given.items()})
    for one in (given, forward, tmp_path / "saved"):
        for split in (None, "other"):
            with pytest.raises(StoreError, match=r"split.*train.*test"):
                stores.open(one, split=split)
        columns = {"elements": True, "columns": ["ids"]}
        train = stores.open(one, split="train", **columns).open_stream
        found = [int(item["ids"]) for number in train.sources for item in train(number)]
        assert found == list(itertools.chain(*TOKENS))
    with pytest.raises(StoreError, match="split"):
        stores.open(given["train"], split="train")


def test_images_may_lie_in_files_and_sounds_are_named(tmp_path, rows):
    from datasets import Audio, Dataset, Image

    image = rows[7]["view"]["image"]
    image.save(tmp_path / "a.png")
    given = Dataset.from_dict({"image": [str(tmp_path / "a.png")], "sound": [None]})
    given = given.cast_column("image", Image()).cast_column("sound", Audio())
    with pytest.raises(StoreError, match=r"'sound' is of the feature Audio.*columns="):
        stores.open(given)
    for one in (given, given.to_iterable_dataset()):
        with pytest.raises(StoreError, match=r"a\.png.*has no folder; give files='anywhere'"):
            next(iter(stores.open(one, columns=["image"]).open_stream(0)))
        (item,) = stores.open(one, columns=["image"], files="anywhere").open_stream(0)
        assert np.array_equal(item["image"].transpose(1, 2, 0), np.asarray(image))


def test_what_is_not_read_is_refused(rows):
    from datasets.distributed import split_dataset_by_node

    for given, what in (
        (rows.with_transform(dict), "transform"),
        (split_dataset_by_node(rows.to_iterable_dataset(num_shards=2), 0, 2), "by node"),
    ):
        with pytest.raises(StoreError, match=what):
            stores.open(given)
    for given in (3, {}, {"train": 3}):
        with pytest.raises(TypeError, match="path is"):
            stores.open(given)
    with pytest.raises(StoreError, match="random access"):
        stores.open(rows.to_iterable_dataset(), deltas={"state": (0, 1)})
    for wrong in (rows.to_iterable_dataset(), {"train": rows}):
        with pytest.raises(TypeError, match=r"stores\.open"):
            StreamDataset(wrong, iter, 2)
        with pytest.raises(TypeError, match=r"stores\.open"):
            StreamDataLoader(wrong)


PAGE = (ROOT / "docs" / "guides" / "shards.md").read_text()


def test_the_program_of_the_page_prints_what_follows_it(tmp_path):
    blocks = re.findall(r"^```py\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```$", PAGE, re.MULTILINE)
    ((code, output),) = blocks
    (tmp_path / "program.py").write_text(code)
    assert run_program(tmp_path / "program.py", folder=tmp_path) == output


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_is_an_iterable_dataset_is_read_whole(workers):
    """It shards itself by torch's worker info, which streams do not see."""
    import datasets

    def open_rows(length):
        rows = datasets.Dataset.from_dict({"x": list(range(length))}).to_iterable_dataset(num_shards=min(length, 3))
        return (row["x"] for row in rows)

    lengths, read = [6, 4, 5, 3], []
    for batch in StreamDataLoader(StreamDataset(lengths, open_rows, 2, time_steps=2, seed=0), workers):
        read += zip(batch.source_index[batch.mask].tolist(), batch.data[batch.mask].tolist(), strict=True)
    assert sorted(read) == [(source, item) for source, length in enumerate(lengths) for item in range(length)]
