"""Every kind of item and leaf: what becomes of it, however it travels; each comes back equal, or is a clear error."""

import collections
import copy
import dataclasses
import json
import pickle
import time
import warnings

import numpy as np
import pytest
import torch
from helpers import loader_of

from stream_dataloader import StreamDataLoader, StreamDataset, interleave
from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.items.plain import from_plain, layout_from_plain, layout_to_plain, to_plain
from stream_dataloader.errors import ItemError, StateError
from stream_dataloader.testing.resume import batch_key

WAYS = [(0, False), (2, False), (2, True)]
Pair = collections.namedtuple("Pair", "first second", defaults=(5,))


class Checked(Pair):
    """A namedtuple that is made in another way than by its fields."""

    def __new__(cls, both):
        return super().__new__(cls, both, both)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Checks an item, which a batch is not; knows what is no argument."""

    image: torch.Tensor
    label: int
    twice: int = dataclasses.field(init=False)

    def __post_init__(self):
        assert self.image.ndim == 1
        object.__setattr__(self, "twice", self.label * 2)


@dataclasses.dataclass
class Unset:
    x: int = dataclasses.field(init=False)


class Own(dict):
    """A dict that is made of something else."""

    def __init__(self, number):
        super().__init__(b=number, a=2 * number)


def batches(sources, workers=0, messages=False, lanes=None, collate_fn=None, **options):
    given = {"time_steps": 2, **options}
    dataset = StreamDataset(range(len(sources)), lambda i: iter(sources[i]), lanes or len(sources), **given)
    return list(loader_of(dataset, workers, collate_fn, messages=messages))


def first_batch(items, workers=0, **options):
    return batches(items if isinstance(items[0], list) else [items], workers, **options)[0]


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


NUMBERS = {repr(item): item for item in (1, 1.5, True, 2j, np.float32(3), np.int16(4), np.array(5))}
WIDE = {float: torch.float64, complex: torch.complex128}


@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_become_tensors_as_torch_would_make_them(workers):
    found = first_batch([[NUMBERS] * 2] * 2, workers).data
    for name, item in NUMBERS.items():
        for data in (found[name], first_batch([[item] * 2] * 2).data):
            assert data.shape == (2, 2), name
            assert data.dtype == WIDE.get(type(item), torch.as_tensor(item).dtype), name
            assert (data == torch.as_tensor(item)).all(), name


@pytest.mark.parametrize("workers", [0, 2])
def test_leaves_that_cannot_be_stacked_come_as_lists(workers):
    boxes = [[1, 2], []]
    batch = first_batch([[("a", boxes, None), ("b", [], {1})], [("c", boxes, "x")]], workers)
    assert batch.data == ([["a", "c"], ["b", None]], [[boxes, boxes], [[], None]], [[None, "x"], [{1}, None]])


@pytest.mark.parametrize(("workers", "messages"), WAYS)
def test_structures_are_rebuilt_of_their_fields(workers, messages):
    def item(i):
        return {"b": Pair(np.full(3, i), (i, "x")), "c": Checked(i), "a": Sample(torch.full((2,), float(i)), i)}

    (batch,) = batches([[item(0), item(1)], [item(2), item(3)]], workers, messages)
    pair, checked, sample = batch.data.values()
    assert list(batch.data) == ["b", "c", "a"]
    assert (type(pair), type(checked), type(sample)) == (Pair, Checked, Sample)
    for leaf in (pair.first[..., 0], pair.second[0], *checked, sample.image[..., 1], sample.label, sample.twice / 2):
        assert leaf.tolist() == [[0, 2], [1, 3]]
    assert pair.second[1] == [["x", "x"], ["x", "x"]]


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


#: Objects that a stream changes before it yields them again, and how.
CHANGED = {
    "list": ([], lambda held, i: held.append(i)),
    "in lists": (
        [[], {"a": []}, ([],)],
        lambda held, i: (held[0].append(i), held[1]["a"].append(i), held[2][0].append(i)),
    ),
    "array in a list": ([np.zeros(1)], lambda held, i: held[0].fill(i)),
    "set": (set(), lambda held, i: held.add(i)),
    "deque": (collections.deque(maxlen=2), lambda held, i: held.append(i)),
    "bytes": (bytearray(1), lambda held, i: held.__setitem__(0, i)),
    "texts": (np.array([""], "U3"), lambda held, i: held.fill(str(i))),
    "objects": (np.array([None]), lambda held, i: held.fill(i)),
    "entry of a table": (np.zeros(1, "i8, f4")[0], lambda held, i: held.__setitem__("f0", i)),
    "masked": (np.ma.masked_array([0, 0], [False, True]), lambda held, i: held.__setitem__(0, i)),
    "sparse": (torch.ones(2).to_sparse(), lambda held, i: held._values().fill_(i)),
}


@pytest.mark.one_of_each
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("options", [{}, {"mark_ends": True}, {"context": 1, "windows": "packed"}], ids=repr)
@pytest.mark.parametrize("kind", CHANGED)
def test_objects_that_streams_change_and_yield_again_are_copied_in_time(kind, options):
    def reuse(start):
        held, change = copy.deepcopy(CHANGED[kind][0]), CHANGED[kind][1]
        for i in range(4):
            change(held, start + i)
            yield "x", held

    def plain(value):
        return repr(value.to_dense() if isinstance(value, torch.Tensor) else value)

    expected = {start: [plain(copy.deepcopy(held)) for _, held in reuse(start)] for start in (0, 10, 20)}
    for workers in (0, 2):
        loader = StreamDataLoader(StreamDataset(list(expected), reuse, 2, time_steps=3, **options), workers)
        for batch in loader:
            for t, lane in (batch.source_index >= 0).nonzero().tolist():
                source, position = 10 * batch.source_index[t, lane].item(), batch.position[t, lane].item()
                assert plain(batch.data[1][t][lane]) == expected[source][position], (workers, source, position)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_list_that_streams_share_is_copied_where_it_is_taken_ahead(workers):
    shared = []

    def reuse(start):
        for i in range(4):
            shared[:] = [start + i]
            yield shared

    dataset = StreamDataset([0, 10], reuse, 2, time_steps=2, mark_ends=True)
    found = [batch.data for batch in StreamDataLoader(dataset, workers)]
    assert found == [[[[0], [10]], [[1], [11]]], [[[2], [12]], [[3], [13]]]]


def test_a_list_that_a_user_changes_does_not_change_the_context_of_the_next_batch():
    batches_of_lists = iter(
        StreamDataLoader(StreamDataset([4], lambda n: ([i] for i in range(n)), 1, time_steps=2, context=1))
    )
    next(batches_of_lists).data[-1][0].append("changed")
    assert next(batches_of_lists).data == [[[1]], [[2]], [[3]]]


@pytest.mark.parametrize("make", [collections.namedtuple, dataclasses.make_dataclass])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_type_that_each_stream_makes_anew_is_the_same_if_its_name_and_fields_are(workers, make):
    def rows(start):  # as `itertuples` of pandas does
        kind = make("Row", ["x", "y"])
        for i in range(3):
            yield kind(start + i, f"{start + i}")

    first, second = StreamDataLoader(StreamDataset([0, 10], rows, 2, time_steps=2), workers)
    assert first.data.x.tolist() == [[0, 10], [1, 11]]
    assert second.data.x.tolist() == [[2, 12], [0, 0]]
    assert second.data.y == [["2", "12"], [None, None]]

    def other(start):
        kind = make("Row", ["x", "y"] if start else ["x", "z"])
        for i in range(3):
            yield kind(start + i, i)

    with pytest.raises(ItemError, match=r"item\.y|\['y'\]|keys"):
        list(StreamDataLoader(StreamDataset([0, 10], other, 2, time_steps=2), workers))


def windows(lengths):
    for start, length in enumerate(lengths):
        steps = np.arange(length) + 10 * start
        yield {"x": torch.from_numpy(steps), "label": start, "names": [f"{s}" for s in steps], "path": "p"}


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_that_streams_cut_are_padded_to_their_streams_first(workers):
    dataset = StreamDataset([[4, 4, 2], [4, 1]], windows, 2, fill_value=-1, windows="given")
    first, second, third = StreamDataLoader(dataset, workers)
    assert first.mask.all()
    assert second.mask.T.int().tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert third.position.T.tolist() == [[8, 9, -1, -1], [-1, -1, -1, -1]]
    assert second.data["x"].T.tolist() == [[10, 11, 12, 13], [10, -1, -1, -1]]
    assert second.data["label"].T.tolist() == [[1, 1, 1, 1], [1, -1, -1, -1]]
    assert second.data["names"][:2] == [["10", "10"], ["11", None]]
    assert second.data["path"] == [["p", "p"], ["p", None], ["p", None], ["p", None]]
    assert [batch.reset.any() for batch in (first, second, third)] == [True, False, False]
    vary = list(StreamDataLoader(StreamDataset([[2, 0, 5], [3]], windows, 2, windows="given"), workers))
    assert [batch.time_steps for batch in vary] == [3, 5]
    assert vary[1].position.T.tolist() == [[2, 3, 4, 5, 6], [-1] * 5]


@pytest.mark.parametrize("fill_value", [7, np.array([1, 2]), torch.tensor(3), None])
def test_fill_value_pads(fill_value):
    batch = first_batch([[np.zeros(2, np.int16)], [np.zeros(2, np.int16)]], fill_value=fill_value)
    assert (batch.data[1] == torch.as_tensor(0 if fill_value is None else fill_value)).all()
    assert first_batch([[np.zeros(2)]], fill_value=0.1).data[1].tolist() == [[0.1, 0.1]], "in double precision"


def test_layouts_and_structures_are_read_as_they_were_written():
    window = {"x": np.zeros((3, 2)), "label": 7, "pair": Pair(np.zeros(3), "name")}
    layout, _ = Layout.of(window, windowed=True)
    assert layout_from_plain(json.loads(json.dumps(layout_to_plain(layout)))) == layout
    plain = to_plain(layout.structure)
    assert from_plain(plain) == layout.structure
    plain["children"][1]["keys"] = ["first", "other"]
    with pytest.raises(StateError, match=r"Pair with \['first', 'other'\], and the class has \['first', 'second'\]"):
        from_plain(plain)


MISFITS = {
    "shape": ({"x": np.zeros(2)}, {"x": np.zeros(3)}, r"item\['x'\] is float64 \(3,\), and was float64 \(2,\)"),
    "dtype": ((np.zeros(2),), (np.zeros(2, int),), r"item\[0\]"),
    "keys": ({"x": 1}, {"y": 1}, r"item has keys \['y'\], and had \['x'\]"),
    "more keys": ({"x": 1}, {"x": 1, "y": 1}, r"item has keys \['x', 'y'\], and had \['x'\]"),
    "type": ((1, 2), {"x": 1}, "item is a dict"),
    "named": ((1, 2), Pair(1, 2), "item is a Pair"),
    "leaf": ({"x": Pair(1, 2)}, {"x": 3}, r"item\['x'\]"),
    "object": ({"x": 1}, {"x": "one"}, r"item\['x'\] is an object"),
    "range": (1, 1 << 70, "number does not fit"),
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MISFITS)
def test_an_item_unlike_its_streams_first_is_an_error_that_names_the_leaf(kind, workers):
    first, second, reason = MISFITS[kind]
    with pytest.raises(ItemError, match=reason) as caught:
        first_batch([[first] * 2, [first, second]], workers)
    assert (caught.value.source_index, caught.value.position, caught.value.lane) == (1, 1, 1)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("windows", ["aligned", "packed"])
def test_a_stream_unlike_the_epochs_first_is_an_error_at_its_own_step(workers, windows):
    sources = [[np.zeros(2)] * 4, [np.zeros(2)] * 2, [np.zeros(2)] * 6, [np.zeros(3)] * 2]
    loader = StreamDataLoader(StreamDataset(sources, iter, 3, time_steps=2, windows=windows), workers)
    read = []
    with pytest.raises(ItemError) as caught:
        read.extend(iter(loader))
    assert (caught.value.source_index, caught.value.lane, len(read)) == (3, 1, 1)


def test_which_worker_was_first_does_not_decide_what_fits():
    def read(n):
        time.sleep(0.1 * (n == 0))
        yield np.zeros(2 + n)

    with pytest.raises(ItemError) as caught:
        list(StreamDataLoader(StreamDataset([0, 1], read, 2, time_steps=1), 2))
    assert (caught.value.source_index, caught.value.worker_id) == (1, 1)


@pytest.mark.parametrize(("workers", "messages"), WAYS)
def test_streams_that_do_not_fit_are_named_by_their_sources_and_not_skipped(workers, messages):
    channels = {"mono.wav": 1, "stereo.wav": 2}
    dataset = StreamDataset(
        list(channels), lambda path: [np.zeros(channels[path])] * 2, 2, time_steps=2, on_error="skip"
    )
    reason = r"source 1 \('stereo.wav'\).* beside the epoch's first \(source 0, 'mono.wav'\).*let open_stream raise"
    with pytest.raises(ItemError, match=reason) as caught:
        list(loader_of(dataset, workers, messages=messages))
    assert caught.value.source == "'stereo.wav'"
    for length in (2, 3):  # wherever in a window it starts
        with pytest.raises(ItemError):
            batches([[np.zeros(1)] * length, [np.zeros(2)]], lanes=1, windows="packed", on_error="skip")


@pytest.mark.parametrize(
    ("item", "reason"), [(3, "no leaf"), ((np.zeros(2), np.zeros(3)), "different numbers of steps")]
)
def test_windows_without_a_common_time_axis_are_an_error(item, reason):
    with pytest.raises(ItemError, match=reason):
        first_batch([[item]], time_steps=None, windows="given")


def quantized():
    with warnings.catch_warnings():  # torch 2.13 deprecates them, and says so once a process
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.quint8)


ODD_TENSORS = {
    "coo": (lambda: torch.eye(2).to_sparse(), lambda t: t.to_dense().tolist()),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), lambda t: t.to_dense().tolist()),
    "meta": (lambda: torch.empty(3, device="meta"), lambda t: (t.shape, t.device.type)),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), lambda t: [x.tolist() for x in t]),
    "quantized": (quantized, lambda t: (t.dequantize().tolist(), t.q_scale())),
    "uint4": (lambda: torch.ones(2, dtype=torch.uint8).view(torch.uint4), lambda t: t.view(torch.uint8).tolist()),
    "masked array": (lambda: np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]), lambda a: (a.tolist(), a.mask.tolist())),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
@pytest.mark.parametrize(("workers", "messages"), WAYS)
def test_tensors_that_are_not_dense_are_objects(workers, messages):
    item = {name: make() for name, (make, _) in ODD_TENSORS.items()}
    (batch,) = batches([[item, item], [item]], workers, messages)
    for name, (make, plain) in ODD_TENSORS.items():
        cells = batch.data[name]
        assert [[cell if cell is None else plain(cell) for cell in row] for row in cells] == [
            [plain(make()), plain(make())],
            [plain(make()), None],
        ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD_TENSORS)
def test_a_dense_tensor_and_one_that_is_not_do_not_fit(name):
    odd = ODD_TENSORS[name][0]()
    dense = torch.zeros(3) if isinstance(odd, torch.Tensor) else np.zeros(3, int)
    with pytest.raises(ItemError, match=r"source 0 .*item 1, lane 0.*item is an object, and was"):
        batches([[dense, odd]])


def test_objects_among_tensors_do_not_get_in_the_way_of_a_batch():
    (batch,) = batches([[{"x": torch.ones(2), "graph": torch.eye(2).to_sparse()}]], time_steps=1)
    assert "['x']: float32 (1, 1, 2), ['graph']: list [1][1]" in repr(batch)
    half = pickle.loads(pickle.dumps(copy.deepcopy(batch))).to(torch.float16)
    assert half.data["x"].dtype == half.data["graph"][0][0].dtype == torch.float16
    assert half.data["graph"][0][0].is_sparse


@pytest.mark.parametrize(("workers", "messages"), WAYS)
def test_every_kind_of_dict_is_a_structure(workers, messages):
    first = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(int, b=1, a=2),
        "count": collections.Counter("bbc"),
        "own": Own(1),
    }
    second = {name: dict(reversed(first[name].items())) for name in ("own", "default", "ordered", "count")}
    (batch,) = batches([[first, second], [first]], workers, messages)
    assert list(batch.data) == list(first)
    for name, value in batch.data.items():
        assert type(value) is dict
        assert list(value) == list(first[name])
        for key, cells in value.items():
            assert cells.tolist() == [[first[name][key]] * 2, [first[name][key], 0]]


@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("first", [[{"y": 0, "x": [1, 1]}], []])
def test_keys_keep_the_order_of_the_first_item(collate_fn, first):
    def keys(batch):
        return list(map(list, batch)) if collate_fn else list(batch.data)

    sources = [first, [{"x": [1, 1], "y": 0}] * 3, [{"y": 0, "x": [1, 1]}] * 3]
    found = []
    for workers, messages in [(0, False), (3, False)] if collate_fn else [*WAYS, (3, False)]:
        read = batches(sources, workers, messages, lanes=3, collate_fn=collate_fn)
        found.append([keys(batch) for batch in read])
    assert all(other == found[0] for other in found)
    assert collate_fn or found[0][0] == (["y", "x"] if first else ["x", "y"])
    (batch,) = batches([[{"1": 1, 1: 2}], [{1: 2, "1": 1}]])  # keys that cannot be compared
    assert {key: cells[0].tolist() for key, cells in batch.data.items()} == {"1": [1, 1], 1: [2, 2]}


def test_an_item_that_cannot_be_looked_into_names_its_source():
    with pytest.raises(ItemError, match=r"source 1 .*the item, a Unset, cannot be read: AttributeError"):
        batches([[1], [Unset()]])
    with pytest.warns(RuntimeWarning, match="skipped the rest of a stream"):
        (batch,) = batches([[Unset()], [1, 2]], lanes=1, on_error="skip")
    assert batch.data.tolist() == [[1], [2]]


@pytest.mark.parametrize(("workers", "messages"), WAYS)
@pytest.mark.parametrize("windowed", [False, True])
def test_each_leaf_can_have_its_own_fill_value(workers, messages, windowed):
    def item(length):
        image, target = torch.ones(length, 2), torch.ones(length, dtype=int)
        if not windowed:
            image, target = image[0], 1
        return {"image": image, "target": Pair(target, (1.5, True)), "name": "a"}

    fill = {"target": Pair(-100, {0: float("inf")}), "image": [7, 8]}
    sources = [[item(2)], [item(1)], [item(2)]] if windowed else [[item(1)] * 2, [item(1)], [item(1)] * 2]
    options = {"time_steps": None, "windows": "given"} if windowed else {"time_steps": 2}
    last = batches(sources, workers, messages, lanes=2, fill_value=fill, **options)[-1]
    assert last.mask.tolist() == [[True, False], [True, False]]
    assert last.data["image"][:, 1].tolist() == [[7, 8], [7, 8]]
    assert last.data["target"].first[:, 1].tolist() == [-100, -100]
    assert [row[1] for row in last.data["name"]] == [None, None]
    if not windowed:
        assert last.data["target"].second[0][:, 1].isinf().all()
        assert not last.data["target"].second[1][:, 1].any()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fill_value", "leaf"),
    [
        (-1, r"fill_value=-1 does not fit item\['valid'\], which is bool \(2,\)"),
        ({"valid": -1}, r"fill_value\['valid'\]=-1"),
        ({"half": 1e6}, r"fill_value\['half'\]=1000000.0"),
        ({"half": np.zeros(3)}, "half"),
        ({"vaild": 1}, r"fill_value has the keys \['vaild'\], and item only has \['half', 'name', 'valid'\]"),
        ({"name": 1}, r"fill_value\['name'\] is 1"),
        ({"valid": {"x": 1}}, r"fill_value\['valid'\]"),
    ],
    ids=str,
)
def test_a_fill_value_that_does_not_fit_is_told_with_the_first_item(fill_value, leaf, workers):
    item = {"half": torch.ones(2, dtype=torch.float16), "valid": torch.ones(2, dtype=torch.bool), "name": "a"}
    with pytest.raises(ValueError, match=leaf):
        batches([[item, item]] * 2, workers, fill_value=fill_value)  # nothing is to be padded


@pytest.mark.parametrize("fill", [{"any": object()}, "idle"])
def test_without_time_steps_an_idle_lane_hands_a_collate_fn_the_fill_value_itself(fill):
    read = batches([[np.zeros(2)] * 2, [np.zeros(2)]], collate_fn=list, time_steps=None, fill_value=fill)
    assert read[1][1] is fill


def test_fill_values_are_looked_at_where_a_dataset_is_built():
    for wrong in ("x", {"label": "x"}, object()):
        with pytest.raises(ValueError, match="fill_value"):
            StreamDataset([0], iter, 1, fill_value=wrong, time_steps=2)
    datasets = [StreamDataset([2], range, 1, time_steps=2, fill_value={"x": np.array([1, 2])}) for _ in range(2)]
    assert interleave(datasets, shuffle=False).fill_value["x"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="fill_value"):
        interleave([datasets[0], StreamDataset([2], range, 1, time_steps=2, fill_value={"x": 1})], shuffle=False)


@pytest.fixture(scope="module")
def batch():
    items = [{"x": torch.ones(2), "label": i, "z": 1j} for i in range(3)]
    return next(iter(StreamDataLoader(StreamDataset([0, 1], lambda _: iter(items), 2, time_steps=2, mark_ends=True))))


def dtypes(batch):
    fields = [field.name for field in dataclasses.fields(batch) if field.name != "data"]
    return {name: getattr(getattr(batch, name), "dtype", None) for name in fields}


def test_a_batch_can_be_copied(batch):
    for same in (batch.map(torch.clone), pickle.loads(pickle.dumps(batch))):
        assert batch_key(same) == batch_key(batch)
    for same in (copy.copy(batch), copy.deepcopy(batch), dataclasses.replace(batch), batch.cpu()):
        assert batch_key(same) == batch_key(batch)
        assert torch.equal(same.worker_id, batch.worker_id)
        assert same.state_dict() == batch.state_dict()
    assert copy.copy(batch).data is batch.data
    changed = copy.deepcopy(batch)
    changed.data["x"] += 1
    assert (batch.data["x"] == 1).all()
    assert dataclasses.replace(batch, batch_index=9).batch_index == 9


def test_a_part_that_a_worker_collates_can_be_copied():
    def count(part):
        same = dataclasses.replace(copy.copy(part), batch_index=7)
        return same.batch_index + int(copy.deepcopy(pickle.loads(pickle.dumps(same))).data.sum())

    dataset = StreamDataset([2, 3], range, 2, time_steps=3)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=count)
    assert list(loader) == [7 + 1 + 3]


def test_a_dtype_is_for_floating_point_data_only(batch):
    for half in (batch.to(torch.float16), batch.to("cpu", torch.float16), batch.to("cpu", dtype=torch.float16)):
        assert [half.data[key].dtype for key in ("x", "label", "z")] == [torch.float16, torch.int64, torch.complex128]
        assert dtypes(half) == dtypes(batch)
    for wrong in ((torch.int64,), ("cpu", torch.int8), (torch.float16, torch.float32)):
        with pytest.raises(TypeError, match="dtype"):
            batch.to(*wrong)
    moved = batch.to("meta", torch.float16)
    assert moved.data["x"].device.type == moved.mask.device.type == "meta"


def test_a_dict_of_a_collate_fn_keeps_its_type_on_the_way_to_a_device():
    ordered = lambda windows: collections.OrderedDict(x=windows[0])  # noqa: E731
    dataset = StreamDataset([2], range, 1, time_steps=2)
    loader = StreamDataLoader(dataset, collate_fn=ordered)
    loader._destination.device = torch.device("meta")  # the only other device that each machine has
    (moved,) = loader
    assert type(moved) is collections.OrderedDict
    assert moved["x"].device.type == "meta"


@pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:TypedStorage")  # torch: once a process, while unpickling
@pytest.mark.parametrize(("workers", "messages"), WAYS)
def test_windows_go_to_a_collate_fn_as_they_are(workers, messages):
    window = collections.OrderedDict(b=np.arange(2), a=Own(1), graph=torch.eye(2).to_sparse(), q=quantized())
    (((read,), (again,)),) = batches(
        [[[window]], [[dict(window)]]], workers, messages, collate_fn=list, time_steps=None, lanes=2
    )
    assert (type(read), type(again), type(read["a"])) == (collections.OrderedDict, dict, Own)
    assert list(read) == list(again) == list(window)
    for plain in (collections.OrderedDict(b=np.arange(2), a=np.arange(2)), torch.ones(2, requires_grad=True)):
        (whole,) = batches([[plain]] * 2, workers, messages, collate_fn=list, time_steps=None, lanes=2)
        assert all(type(one) is type(plain) for one in whole)
        assert all(list(one) == ["b", "a"] if isinstance(one, dict) else one.requires_grad for one in whole)
    assert torch.equal(read["graph"].to_dense(), torch.eye(2))
    assert torch.equal(read["q"].dequantize(), quantized().dequantize())


def test_lanes_of_a_collate_fn_go_on_with_their_own_layout():
    sources = [[1.0] * 6, [(1, 2)] * 9, [2.0] * 5]  # the second is in a lane of its own
    read = batches(sources, lanes=2, collate_fn=list, time_steps=4, windows="packed")
    assert [one.tolist() for one, _ in read[:2]] == [[1, 1, 1, 1], [1, 1, 2, 2]]


@pytest.mark.parametrize("thing", ["text", None, [1]])
@pytest.mark.parametrize("container", [{"a": np.zeros(2)}, ("x", 1), {}])
def test_a_container_where_an_object_was_is_an_error_for_any_workers(thing, container):
    """In the same stream, and in another one beside it: its parts are leaves, whatever was read before."""
    for streams in ([[thing] * 2, [container] * 2], [[thing, thing], [thing, container]]):
        for workers in (0, 1, 2):
            dataset = StreamDataset(streams, iter, 2, time_steps=2)
            with pytest.raises(ItemError, match=r"source 1\b.*lane 1\b") as raised:
                list(StreamDataLoader(dataset, workers, worker_method="thread"))
            assert raised.value.lane == 1, workers
