"""What tensordict saved, read without it."""

import itertools
import json
import os
import pathlib
import re

import numpy as np
import pytest
import torch
from helpers import FULL
from saved_tensordicts import Constant, Texts, recording, save, steps_of
from store_tests import StoreTests

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import TensorDictStore

STEPS = 61
TREE = recording(STEPS)
ITEMS = steps_of(TREE, STEPS)
BOUNDS = [0, 20, 27, 58, 61]


def saved(tmp_path, tree=None, batch=(STEPS,)):
    return save(tmp_path / "a", TREE if tree is None else tree, batch)


class OfEpisodes(StoreTests):
    damages = 500 if FULL else 12

    @pytest.fixture
    def options(self):
        return {"stream": ("collector", "traj_ids")}

    @pytest.fixture
    def made(self, tmp_path, options):
        return TensorDictStore(saved(tmp_path), **options)

    @pytest.fixture
    def expected(self):
        return [ITEMS[start:stop] for start, stop in itertools.pairwise(BOUNDS)]


class TestEpisodes(OfEpisodes):
    pass


class TestNumbers(OfEpisodes):
    """Without texts, windows are written into the batch."""

    @pytest.fixture
    def options(self):
        return {"done": ("next", "done"), "columns": ["pixels", "action", "nothing", "next"]}

    @pytest.fixture
    def expected(self):
        items = [{key: item[key] for key in ("pixels", "action", "nothing", "next")} for item in ITEMS]
        return [items[start:stop] for start, stop in itertools.pairwise(BOUNDS)]


def test_the_whole_is_one_stream(tmp_path):
    sources, store = stores.open(saved(tmp_path))
    assert (len(sources), store.lengths.tolist(), store.key(0)) == (1, [STEPS], "0")
    info = store.info()
    assert info.metadata == {"robot": "arm"}
    assert info.version == "1"
    assert info.leaves == {
        "['action']": "bfloat16 (2,)",
        "['collector']['traj_ids']": "int64 ()",
        "['next']['deep']['a/b']": "int64 ()",
        "['next']['done']": "bool (1,)",
        "['next']['reward']": "float64 (1,)",
        "['nothing']": "float32 (0,)",
        "['pixels']": "uint8 (3, 4, 5)",
        "['task']": "an object",
    }


def test_lengths_are_a_column_or_a_file(tmp_path):
    tree = {"x": np.arange(10), "n": np.array([3, 0, 7], np.int32)}
    store = TensorDictStore(saved(tmp_path, tree, ()), lengths="n")
    assert [[int(item["x"]) for item in store(number)] for number in range(3)] == [[0, 1, 2], [], list(range(3, 10))]
    assert list(store.info().leaves) == ["['x']"]
    np.save(tmp_path / "a" / "lengths.npy", np.array([4, 6]))
    for path in ("lengths.npy", str(tmp_path / "a" / "lengths.npy")):
        assert TensorDictStore(store.path, columns=["x"], lengths=path).lengths.tolist() == [4, 6]
    for wrong in ([4, 5], [-1, 11], [2**62, 2**62], [4.0, 6.0], [[4, 6]]):
        np.save(tmp_path / "a" / "lengths.npy", np.array(wrong))
        with pytest.raises(StoreError, match=r"lengths.npy"):
            TensorDictStore(store.path, columns=["x"], lengths="lengths.npy")


def test_a_replay_buffer_is_read_as_far_as_it_was_filled(tmp_path):
    folder = saved(tmp_path)
    (folder / "storage_metadata.json").write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": 22}))
    assert TensorDictStore(folder, stream=("collector", "traj_ids")).lengths.tolist() == [20, 2]
    assert TensorDictStore(folder).lengths.tolist() == [22]
    (folder / "storage_metadata.json").write_text(json.dumps({"len": STEPS + 1}))
    with pytest.raises(StoreError, match="62 steps are filled, of 61"):
        TensorDictStore(folder)


def test_nested_names_are_tuples_and_take_all_below(tmp_path):
    item = next(iter(TensorDictStore(saved(tmp_path), columns=[("next", "deep"), "pixels"])(0)))
    assert (sorted(item), list(item["next"])) == (["next", "pixels"], ["deep"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"columns": "pixels"}, TypeError),
        ({"columns": []}, TypeError),
        ({"columns": [3]}, TypeError),
        ({"columns": ["depth"]}, StoreError),
        ({"columns": ["robot"]}, StoreError),
        ({"stream": "x", "done": "y"}, ValueError),
        ({"stream": 3}, TypeError),
        ({"stream": ("collector", "x")}, StoreError),
        ({"stream": "pixels"}, StoreError),
        ({"stream": "action"}, StoreError),
        ({"done": ("next", "reward")}, StoreError),
        ({"lengths": ("next", "deep", "a/b")}, StoreError),
        ({"lengths": "task"}, StoreError),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, options, error):
    option, value = next(iter(options.items()))
    name = value[-1] if isinstance(value, (list, tuple)) and value else value
    with pytest.raises(error, match=re.escape(str(name)) if error is StoreError else option):
        TensorDictStore(saved(tmp_path), **options)


def change(folder, key, **entries):
    meta = json.loads((folder / "meta.json").read_text())
    if key is None:
        meta |= entries
    else:
        meta[key] |= entries
    (folder / "meta.json").write_text(json.dumps(meta))


PICKLE = b"cos\nsystem\n(S'touch pwned'\ntR."
REFUSED = {
    "'robot' is pickled": lambda folder: (folder / "robot" / "other.pickle").write_bytes(PICKLE),
    "'task' is pickled": lambda folder: (folder / "task" / "pickle.pkl").write_bytes(PICKLE),
    "'pixels' is a nested tensor": lambda folder: change(folder, "pixels", is_nested=True),
    "'next' is a 'LazyStacked": lambda folder: rewrite(folder / "next", _type="LazyStackedTensorDict", stack_dim=0),
    "'task' is a .*NonTensorStack": lambda folder: change(folder / "task", None, data=[1, 2]),
    "'next' is a .*mine.Own": lambda folder: rewrite(folder / "next", _type="<class 'mine.Own'>", index=3),
    "'pixels' is named like a field of meta.json, or damaged": lambda folder: change(folder, None, pixels=None),
    "'next' is named like a field of meta.json, or damaged": lambda folder: change(folder, None, next=2**62),
    "'shape' is named": lambda folder: (folder / "shape.memmap").write_bytes(bytes(STEPS)),
    "'nothing' is one number": lambda folder: change(folder, "nothing", shape=[]),
    "'nothing' has 60 rows, and time has 61": lambda folder: change(folder, "nothing", shape=[60, 0]),
}


def rewrite(folder, **entries):
    (folder / "meta.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_read_is_named_and_can_be_left_out(tmp_path, message):
    REFUSED[message](saved(tmp_path))
    with pytest.raises(StoreError, match=message):
        TensorDictStore(tmp_path / "a")
    assert len(list(TensorDictStore(tmp_path / "a", columns=["action"])(0))) == STEPS
    assert not pathlib.Path("pwned").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.unlink(folder / "pixels.memmap"), "pixels.memmap is missing"),
        (lambda folder: os.truncate(folder / "pixels.memmap", 100), "pixels.memmap is damaged: 100 bytes of 3,660"),
        (lambda folder: os.unlink(folder / "next" / "meta.json"), "next/meta.json is missing"),
        (lambda folder: (folder / "next" / "meta.json").write_text("[3"), "cannot be read"),
        (lambda folder: change(folder, None, _format_version=2), "of format 2"),
        (lambda folder: change(folder, "pixels", shape=[STEPS, 1 << 50]), "bytes of 68,679"),
        (lambda folder: change(folder, "pixels", shape=[STEPS, -1]), "a cannot be read|is damaged"),
        (lambda folder: change(folder, "pixels", shape=[STEPS, 1 << 60]), "a cannot be read|is damaged"),
        (lambda folder: change(folder, "pixels", dtype="torch.float512"), "meta.json, 'pixels' cannot be read"),
        (lambda folder: change(folder, "pixels", shape=None, dtype=None), "meta.json, 'pixels' cannot be read"),
        (lambda folder: change(folder, None, **{"../../etc": {"type": "TensorDict"}}), "etc/meta.json is missing"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path, damage, message):
    damage(saved(tmp_path))
    with pytest.raises(StoreError, match=message):
        TensorDictStore(tmp_path / "a", stream=("collector", "traj_ids"))


def test_keys_before_they_were_encoded_are_found(tmp_path):
    folder = saved(tmp_path, {"white space": np.arange(4)}, (4,))
    os.rename(folder / "white%20space.memmap", folder / "white space.memmap")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(
        json.dumps({key: meta[key] for key in meta if key not in ("_class", "_format_version")})
    )
    store = TensorDictStore(folder)
    assert [int(item["white space"]) for item in store(0)] == [0, 1, 2, 3]
    assert store.info().version == "0"


def test_a_tensorclass_is_a_dict(tmp_path):
    save(tmp_path / "a" / "_tensordict", {"x": np.arange(4), "s": Constant("hi")}, (4,))
    (tmp_path / "a" / "meta.json").write_text(json.dumps({"_type": "<class '__main__.Sample'>"}))
    store = stores.open(tmp_path / "a").open_stream
    assert list(store(0)) == [{"x": x} for x in range(4)]
    (tmp_path / "a" / "other.pickle").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"'other.pickle' is pickled"):
        stores.open(tmp_path / "a")
    assert TensorDictStore(tmp_path / "a", columns=["x"]).lengths.tolist() == [4]


def test_what_is_no_tensordict_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"_type": "x", "_is_non_tensor": True, "data": 3}))
    with pytest.raises(StoreError, match="no saved TensorDict"):
        TensorDictStore(tmp_path)
    with pytest.raises(StoreError, match="holds no tensors"):
        TensorDictStore(saved(tmp_path, {}))


def test_an_empty_recording_has_no_episodes(tmp_path):
    folder = saved(tmp_path, {"x": torch.zeros(0, 3), "n": torch.zeros(0, dtype=torch.int64)}, (0,))
    assert TensorDictStore(folder).lengths.tolist() == [0]
    assert list(TensorDictStore(folder)(0)) == []
    for option in ("lengths", "stream", "done"):
        assert len(TensorDictStore(folder, **{option: "n"})) == 0


def test_texts_can_say_where_episodes_begin(tmp_path):
    folder = saved(tmp_path, {"x": np.arange(5), "clip": Texts("aabbb")}, (5,))
    assert TensorDictStore(folder, stream="clip").lengths.tolist() == [2, 3]


def test_tensordict_is_not_imported(tmp_path, programs):
    code = (
        "import sys; from stream_dataloader import stores; "
        f"list(stores.open({str(saved(tmp_path))!r}).open_stream(0)); assert 'tensordict' not in sys.modules"
    )
    done = programs(code)
    assert done.returncode == 0, done.stderr
