"""Layouts: what is like what, and what a leaf looks like."""

import collections

import numpy as np
import pytest
import torch

from stream_dataloader._items.fill import FillValue
from stream_dataloader._items.layout import Layout, Spec, spec_of, window_spec_of
from stream_dataloader._items.structure import Misfit, has_dict, is_rebuilt

Pair = collections.namedtuple("Pair", "first second")


def layout_of(item, windowed=False):
    return Layout.of(item, windowed)[0]


@pytest.mark.parametrize(
    ("leaf", "spec"),
    [
        (np.zeros((2, 3), np.int16), Spec(torch.int16, (2, 3))),
        (np.zeros(2, ">f4"), Spec(torch.float32, (2,))),
        (torch.zeros(4, dtype=torch.bfloat16), Spec(torch.bfloat16, (4,))),
        (1, Spec(torch.int64, ())),
        (True, Spec(torch.bool, ())),
        ("text", Spec(None, ())),
        (np.array(["a"]), Spec(None, ())),
        (np.ma.masked_array([1.0], [True]), Spec(None, ())),
        (torch.zeros(2).to_sparse(), Spec(None, ())),
    ],
)
def test_spec_of_a_leaf(leaf, spec):
    assert spec_of(leaf) == spec


def test_windows_lead_with_time_but_for_leaves_of_the_whole_window():
    assert window_spec_of(np.zeros((5, 2))) == Spec(torch.float64, (2,))
    assert window_spec_of(1.5) == Spec(torch.float64, (), timed=False)
    assert window_spec_of(["a", "b"]) == Spec(None, ())
    assert window_spec_of("ab") == Spec(None, (), timed=False)


def test_layouts_are_alike_whatever_the_order_of_keys():
    first, second = layout_of({"b": 1, "a": 2.0}), layout_of({"a": 2.0, "b": 1})
    assert first == second
    assert hash(first) == hash(second)
    assert list(first.build([20, 10])) == ["b", "a"]
    assert first.build([20, 10]) == second.build([20, 10]) == {"a": 20, "b": 10}


def test_read_gives_the_leaves_that_build_needs():
    item = {"pair": Pair(np.ones(2), 3), "name": "x"}
    layout = layout_of(item)
    built = layout.build(layout.read(item))
    assert built["pair"].first.tolist() == [1, 1]
    assert (type(built["pair"]), built["pair"].second, built["name"]) == (Pair, 3, "x")


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"image": np.zeros(3, np.uint8), "label": 1}, r"item\['image'\] is uint8 \(3,\), and was uint8 \(2,\)"),
        ({"image": np.zeros(2, np.uint8), "label": 1.5}, r"item\['label'\] is float64 \(\), and was int64 \(\)"),
        ({"image": np.zeros(2, np.uint8)}, r"has keys \['image'\], and had \['image', 'label'\]"),
        (np.zeros(2, np.uint8), "item is a ndarray, and was a dict"),
    ],
)
def test_what_does_not_fit_names_the_leaf_and_both_sides(item, told):
    layout = layout_of({"image": np.zeros(2, np.uint8), "label": 1})
    with pytest.raises(Misfit, match=told):
        layout.read(item)


def test_the_leaves_of_a_window_agree_on_its_length():
    with pytest.raises(Misfit, match=r"item\['a'\] has 2, item\['b'\] has 3"):
        layout_of({"a": np.zeros(2), "b": np.zeros((3, 1))}, windowed=True)
    with pytest.raises(Misfit, match="no leaf of the window has a time axis"):
        layout_of({"a": 1}, windowed=True)


def test_an_order_of_keys_is_kept_only_where_it_says_something():
    assert has_dict(layout_of(({"a": 1, "b": 2}, 3)).structure)
    assert not has_dict(layout_of(({"a": 1}, 3)).structure)
    assert is_rebuilt({"a": 1, "b": (2, {"c": 3})})
    assert not is_rebuilt({"b": 1, "a": 2})
    assert not is_rebuilt({"a": collections.OrderedDict(b=1)})


def test_fill_values_are_worked_out_once_a_layout():
    layout = layout_of({"a": np.zeros(2, np.float32), "b": "x"})
    fill = FillValue({"a": 1.5})
    number, none = fill.of(layout)
    assert (number.dtype, number.tolist(), none) == (np.float32, 1.5, None)
    assert fill.of(layout) is fill.of(layout_of({"a": np.ones(2, np.float32), "b": "y"}))
