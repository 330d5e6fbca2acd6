"""tensordict itself as the judge: what it saves is read as it reads it, and it reads what our tests write.

These run in an environment of their own, with the peers; elsewhere they are left out where tensordict is missing.
"""

import filecmp
import importlib.util
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from helpers import PATIENCE, read
from saved_tensordicts import Constant, Texts, recording, save, steps_of

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import TensorDictStore
from stream_dataloader.testing._items import assert_same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tensordict = pytest.importorskip("tensordict")
TensorDict = tensordict.TensorDict
STEPS = 61
NEW = tuple(map(int, tensordict.__version__.split(".")[:2])) >= (0, 15)


def as_tensordict(tree, batch):
    """What `save` writes, as tensordict has it."""
    found = TensorDict({}, batch)
    for key, value in tree.items():
        if isinstance(value, dict):
            found[key] = as_tensordict(value, batch)
        elif isinstance(value, Texts):
            found[key] = tensordict.NonTensorStack(*value)
        elif isinstance(value, Constant):
            found[key] = tensordict.NonTensorData(value.data, batch_size=batch)
        else:
            found[key] = torch.as_tensor(value)
    return found


@pytest.mark.skipif(not NEW, reason="writes an older version of the format")
@pytest.mark.parametrize(
    ("tree", "batch"),
    [
        (recording(STEPS), (STEPS,)),
        ({"x": np.arange(10), "n": np.array([3, 0, 7], np.int32)}, ()),
        ({"x": torch.zeros(0, 3), "n": torch.zeros(0, dtype=torch.int64)}, (0,)),
        ({"white space": np.arange(4), "..": np.arange(4)}, (4,)),
    ],
)
def test_our_writer_writes_what_tensordict_does(tmp_path, tree, batch):
    ours, theirs = save(tmp_path / "ours", tree, batch), tmp_path / "theirs"
    as_tensordict(tree, batch).memmap(theirs)
    names = [
        sorted(
            os.path.relpath(os.path.join(folder, name), root) for folder, _, files in os.walk(root) for name in files
        )
        for root in (ours, theirs)
    ]
    assert names[0] == names[1]
    assert filecmp.cmpfiles(ours, theirs, names[0], shallow=False)[1:] == ([], [])


def test_tensordict_reads_what_our_writer_writes(tmp_path):
    tree = recording(STEPS)
    loaded = TensorDict.load_memmap(save(tmp_path / "a", tree, (STEPS,)))
    for name in (("pixels",), ("action",), ("next", "reward"), ("next", "deep", "a/b"), ("collector", "traj_ids")):
        expected = tree
        for key in name:
            expected = expected[key]
        assert torch.equal(loaded[name], torch.as_tensor(expected))
    assert loaded.get("task").tolist() == list(tree["task"])


@pytest.mark.parametrize("robust", [True, False])
def test_what_tensordict_saves_is_read(tmp_path, robust):
    tree = recording(STEPS)
    if not robust:  # a key that cannot be a file's name cannot be saved like this
        tree["next"]["deep"] = {"white space": np.arange(STEPS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        as_tensordict(tree, (STEPS,)).memmap(tmp_path / "a", robust_key=robust)
    store = stores.open(tmp_path / "a", stream=("collector", "traj_ids")).open_stream
    assert store.lengths.tolist() == [20, 7, 31, 3]
    assert store.info().metadata == {"robot": "arm"}
    found = [item for number in store.sources for item in read(store(number))]
    assert_same(found, steps_of(tree, STEPS), "a", "read without tensordict")


@pytest.mark.parametrize(
    "dtype",
    ["float8_e4m3fn", "float16", "bfloat16", "complex64", "uint16", "uint32", "uint64", "int8", "complex128", "bool"],
)
def test_numbers_of_any_dtype_are_read(tmp_path, dtype):
    numbers = torch.arange(6).reshape(3, 2).to(getattr(torch, dtype))
    TensorDict({"x": numbers}, [3]).memmap(tmp_path / "a")
    found = [torch.as_tensor(item["x"]) for item in read(TensorDictStore(tmp_path / "a")(0))]
    assert [row.dtype for row in found] == [numbers.dtype] * 3
    assert torch.equal(torch.stack(found).view(torch.uint8), numbers.view(torch.uint8))


def test_a_tensorclass_is_read(tmp_path):
    @tensordict.tensorclass
    class Sample:
        x: torch.Tensor
        label: str

    TensorDict({"s": Sample(x=torch.arange(3), label="hi", batch_size=[3])}, [3]).memmap(tmp_path / "a")
    store = TensorDictStore(tmp_path / "a")
    assert [int(item["s"]["x"]) for item in read(store(0))] == [0, 1, 2]
    assert store.info().metadata == {"s.label": "hi"}
    Sample(x=torch.arange(3), label=object, batch_size=[3]).memmap(tmp_path / "b")
    with pytest.raises(StoreError):
        TensorDictStore(tmp_path / "b")
    assert len(read(TensorDictStore(tmp_path / "b", columns=["x"])(0))) == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: tensordict.NonTensorData(object, batch_size=[2]), "'x' is pickled"),
        (lambda: tensordict.NonTensorStack(object, str), "'x' is pickled"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "'x' is a nested tensor"),
        (
            lambda: tensordict.lazy_stack([TensorDict({"y": torch.zeros(n)}, []) for n in (2, 3)]),
            "'x' is a .*LazyStacked",
        ),
        (lambda: TensorDict({"y": torch.zeros(3)}, [3])._get_sub_tensordict(slice(0, 2)), "'x' is a .*SubTensorDict"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, value, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        TensorDict({"x": value(), "z": torch.zeros(2)}, [2]).memmap(tmp_path / "a")
    with pytest.raises(StoreError, match=message):
        TensorDictStore(tmp_path / "a")
    assert len(read(TensorDictStore(tmp_path / "a", columns=["z"])(0))) == 2


def test_a_smaller_tensordict_over_a_larger_one_is_read(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        TensorDict({"x": torch.arange(9)}, [9]).memmap(tmp_path / "a")
        TensorDict({"x": torch.arange(4)}, [4]).memmap(tmp_path / "a")
    assert [int(item["x"]) for item in read(TensorDictStore(tmp_path / "a")(0))] == [0, 1, 2, 3]


REPLAY = """
import sys, torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer
buffer = ReplayBuffer(storage=LazyMemmapStorage(50), batch_size=2)
buffer.extend(TensorDict({"x": torch.arange(7), "collector": {"traj_ids": torch.arange(7) // 3}}, [7]))
buffer.dumps(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="torchrl is not installed")
def test_a_replay_buffer_of_torchrl_is_read(tmp_path):
    subprocess.run([sys.executable, "-c", REPLAY, tmp_path / "a"], check=True, timeout=PATIENCE)
    store = stores.open(tmp_path / "a" / "storage", stream=("collector", "traj_ids"), columns=["x"]).open_stream
    assert [[int(item["x"]) for item in read(store(number))] for number in store.sources] == [[0, 1, 2], [3, 4, 5], [6]]
