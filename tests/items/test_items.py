"""Every kind of item, and what becomes of it."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

from stream_dataloader import ItemError, StreamDataLoader, StreamDataset

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: int

    def __post_init__(self):
        assert self.image.ndim == 1, "a batch is not checked like an item"


def first_batch(items, workers=0, time_steps=2, **options):
    sources = items if isinstance(items[0], list) else [items]
    dataset = StreamDataset(
        range(len(sources)), lambda i: iter(sources[i]), len(sources), time_steps=time_steps, **options
    )
    return next(iter(StreamDataLoader(dataset, workers)))


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_keep_their_dtype(workers):
    item = {str(dtype): torch.tensor([[0, 1, 1]] * 2).to(dtype) for dtype in DTYPES}
    batch = first_batch([[item, item], [item]], workers)
    for name, tensor in item.items():
        found = batch.data[name]
        assert (found.dtype, found.shape) == (tensor.dtype, (2, 2, 2, 3))
        assert torch.equal(found[0, 0], tensor)
        assert torch.equal(found[1, 1], torch.zeros_like(tensor))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("item", [1, 1.5, True, 2j, np.float32(3), np.int16(4), np.array(5)], ids=repr)
def test_numbers_become_tensors_as_torch_would_make_them(item, workers):
    batch = first_batch([[item, item], [item, item]], workers)
    assert batch.data.shape == (2, 2)
    wide = {float: torch.float64, complex: torch.complex128}
    assert batch.data.dtype == wide.get(type(item), torch.as_tensor(item).dtype)
    assert (batch.data == torch.as_tensor(item)).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_leaves_that_cannot_be_stacked_come_as_lists(workers):
    boxes = [[1, 2], []]
    batch = first_batch([[("a", boxes, None), ("b", [], {1})], [("c", boxes, "x")]], workers)
    names, lists, anything = batch.data
    assert names == [["a", "c"], ["b", None]]
    assert lists == [[boxes, boxes], [[], None]]
    assert anything == [[None, "x"], [{1}, None]]


@pytest.mark.parametrize("workers", [0, 2])
def test_structures_are_kept(workers):
    def item(i):
        return {"b": Pair(np.full(3, i), (i, "x")), "a": Sample(torch.full((2,), float(i)), i)}

    batch = first_batch([[item(0), item(1)], [item(2), item(3)]], workers)
    assert set(batch.data) == {"a", "b"}
    assert type(batch.data["b"]) is Pair
    assert type(batch.data["a"]) is Sample
    assert batch.data["b"].first[..., 0].tolist() == [[0, 2], [1, 3]]
    assert batch.data["b"].second[0].tolist() == [[0, 2], [1, 3]]
    assert batch.data["b"].second[1] == [["x", "x"], ["x", "x"]]
    assert batch.data["a"].image.shape == (2, 2, 2)
    assert batch.data["a"].label.tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_buffer_that_streams_fill_again_and_again_is_copied_in_time(workers):
    scratch = np.zeros(4)

    def reuse(start):
        for i in range(4):
            scratch[:] = start + i
            yield scratch

    loader = StreamDataLoader(StreamDataset([0, 10, 20], reuse, 3, time_steps=2), workers)
    assert [batch.data[..., 0].T.tolist() for batch in loader] == [
        [[0, 1], [10, 11], [20, 21]],
        [[2, 3], [12, 13], [22, 23]],
    ]


def windows(lengths):
    for start, length in enumerate(lengths):
        steps = np.arange(length) + 10 * start
        yield {"x": torch.from_numpy(steps), "label": start, "names": [f"{s}" for s in steps], "path": "p"}


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_that_streams_cut_are_padded_to_their_streams_first(workers):
    dataset = StreamDataset([[4, 4, 2], [4, 1]], windows, 2, fill_value=-1)
    batches = list(StreamDataLoader(dataset, workers))
    assert [batch.mask.T.int().tolist() for batch in batches] == [
        [[1, 1, 1, 1], [1, 1, 1, 1]],
        [[1, 1, 1, 1], [1, 0, 0, 0]],
        [[1, 1, 0, 0], [0, 0, 0, 0]],
    ]
    assert batches[1].data["x"].T.tolist() == [[10, 11, 12, 13], [10, -1, -1, -1]]
    assert batches[2].position.T.tolist() == [[8, 9, -1, -1], [-1, -1, -1, -1]]
    assert batches[1].data["label"].T.tolist() == [[1, 1, 1, 1], [1, -1, -1, -1]]
    assert batches[1].data["names"][0] == ["10", "10"]
    assert batches[1].data["names"][1] == ["11", None]
    assert batches[1].data["path"] == [["p", "p"], ["p", None], ["p", None], ["p", None]]
    assert batches[0].reset.tolist() == [True, True]
    assert batches[1].reset.tolist() == [False, False]


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_may_vary_and_be_empty(workers):
    dataset = StreamDataset([[2, 0, 5], [3]], windows, 2)
    batches = list(StreamDataLoader(dataset, workers))
    assert [batch.time_steps for batch in batches] == [3, 5]
    assert batches[1].position.T.tolist() == [[2, 3, 4, 5, 6], [-1] * 5]


@pytest.mark.parametrize("fill_value", [7, np.array([1, 2]), torch.tensor(3), None])
def test_fill_value_pads(fill_value):
    batch = first_batch([[np.zeros(2, np.int16)], [np.zeros(2, np.int16)]], fill_value=fill_value)
    expected = torch.as_tensor(0 if fill_value is None else fill_value).broadcast_to(2)
    assert (batch.data[1] == expected).all()


MISFITS = {
    "shape": ({"x": np.zeros(2)}, {"x": np.zeros(3)}, r"item\['x'\] is float64 \(3,\), and was float64 \(2,\)"),
    "dtype": ((np.zeros(2),), (np.zeros(2, int),), r"item\[0\] is int64 \(2,\), and was float64 \(2,\)"),
    "keys": ({"x": 1}, {"y": 1}, r"item has keys \['y'\], and had \['x'\]"),
    "type": ((1, 2), {"x": 1}, "item is a dict, and was a tuple"),
    "leaf": ({"x": Pair(1, 2)}, {"x": 3}, r"item\['x'\] is a int, and was a Pair"),
    "object": ({"x": 1}, {"x": "one"}, r"item\['x'\] is an object, and was int64"),
    "range": (1, 1 << 70, "number does not fit"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MISFITS)
def test_an_item_unlike_its_streams_first_is_an_error_that_names_the_leaf(kind, workers):
    first, second, reason = MISFITS[kind]
    with pytest.raises(ItemError, match=reason) as caught:
        first_batch([[first] * 2, [first, second]], workers)
    assert (caught.value.source_index, caught.value.position, caught.value.lane) == (1, 1, 1)
    assert "source 1" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("windows", ["aligned", "packed"])
def test_a_stream_unlike_the_epochs_first_is_an_error_at_its_own_step(workers, windows):
    sources = [[np.zeros(2)] * 4, [np.zeros(2)] * 2, [np.zeros(2)] * 6, [np.zeros(3)] * 2]
    loader = StreamDataLoader(StreamDataset(sources, iter, 3, time_steps=2, windows=windows), workers)
    batches = []
    with pytest.raises(ItemError, match=r"item is float64 \(3,\), and in the first was float64 \(2,\)") as caught:
        batches.extend(iter(loader))
    assert caught.value.source_index == 3
    assert caught.value.lane == 1


@pytest.mark.parametrize(
    ("item", "reason"), [(3, "no leaf"), ((np.zeros(2), np.zeros(3)), "different numbers of steps")]
)
def test_windows_without_a_common_time_axis_are_an_error(item, reason):
    with pytest.raises(ItemError, match=reason):
        first_batch([[item]], time_steps=None)


def test_a_batch_shows_shapes_and_moves():
    batch = first_batch([{"x": np.zeros((3, 2), np.uint8), "name": "a"}])
    assert "['x']: uint8 (2, 1, 3, 2), ['name']: list [2][1]" in repr(batch)
    moved = batch.to("meta")
    assert moved.data["x"].device.type == moved.mask.device.type == "meta"
    assert moved.data["name"] == batch.data["name"]
    assert (len(batch), batch.time_steps) == (1, 2)
