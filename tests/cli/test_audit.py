"""An audit finds what loaders do to their rows: right ones pass, and each mistake has its number and place."""

import json

import numpy as np
import pytest
import torch
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.testing import audit


def rows(*cells, time_steps=1):
    """A batch of given cells, `(source, position)` or None, and a flag where one is the third."""
    ids = np.array([-1 if cell is None else cell[0] for cell in cells]).reshape(time_steps, -1)
    positions = np.array([0 if cell is None else cell[1] for cell in cells]).reshape(time_steps, -1)
    starts = np.array([cell is not None and len(cell) > 2 for cell in cells]).reshape(time_steps, -1)
    return ids, positions, starts


KEYS = {"ids": lambda batch: batch[0], "positions": lambda batch: batch[1]}
FLAGS = KEYS | {"starts": lambda batch: batch[2]}


def lines_of(found):
    return {line[4:25].strip(): line[25:] for line in str(found).splitlines()[1:-1]}


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["aligned", "packed"]),
    st.booleans(),
)
@random_cases(60)
def test_our_own_batches_pass_and_need_no_keys(lengths, lanes, time_steps, windows, shuffle):
    dataset = StreamDataset(lengths, range, lanes, time_steps=time_steps, windows=windows, shuffle=shuffle, seed=0)
    loader = StreamDataLoader(dataset)
    sources = [batch.source_index for batch in loader]
    loader.set_epoch(0)
    found = audit(loader, total=sum(lengths), epochs=1)
    assert found.wrong == [], str(found)
    assert (found.delivered, found.repeats, found.backward) == (sum(lengths), 0, 0)
    assert found.padding == pytest.approx(1 - sum(lengths) / torch.cat(sources).numel())
    moves = found.between.moves + found.inside.moves
    assert found.flags == (moves, 0, 0)
    assert moves == sum(lengths) - (torch.cat(sources) >= 0).any(0).sum()


def test_a_plain_loader_loses_the_rows():
    frames = [(episode, frame) for episode in range(4) for frame in range(6)]
    keys = {"ids": lambda batch: batch[0], "positions": lambda batch: batch[1], "total": 24}
    found = audit(DataLoader(frames, batch_size=4), **keys)
    assert (found.between.right, found.between.moves) == (0, 40)
    assert found.between.first_wrong == "epoch 0, batch 1, row 0: 0 at 0, then 0 at 4"
    assert found.wrong == ["rows between batches", "epochs"]
    assert found.same_draws
    shuffled = audit(DataLoader(frames, batch_size=4, shuffle=True), **keys, epochs=1)
    assert shuffled.wrong == ["rows between batches", "order in each stream"]
    by_episode = audit(DataLoader(frames, batch_size=1), **keys, epochs=1)
    assert by_episode.wrong == []


@pytest.mark.parametrize(
    ("batches", "kind", "place"),
    [
        (
            [rows((0, 0), (1, 0)), rows((0, 1), (1, 2)), rows((0, 2), (1, 1))],
            "skips or repeats",
            "row 1: 1 at 0, then 1 at 2",
        ),
        (
            [rows((0, 0), (1, 0)), rows((1, 1), (0, 1))],
            "enters another stream in the middle",
            "row 0: 0 at 0, then 1 at 1",
        ),
        (
            [rows((0, 0), (1, 0)), rows((2, 0), (1, 1)), rows((0, 1), None)],
            "leaves a stream early",
            "row 0: 0 at 0, then 2 at 0",
        ),
        (
            [rows((0, 0), None, (0, 2), (1, 0), time_steps=2), rows((0, 1), None)],
            "skips or repeats",
            "row 0: 0 at 0, then 0 at 2",
        ),
    ],
)
def test_each_way_to_lose_a_row_has_its_name_and_place(batches, kind, place):
    found = audit(lambda: batches, **KEYS, epochs=1)
    wrong = found.inside if len(batches[0][0]) > 1 else found.between
    assert wrong.kinds[kind] >= 1
    assert wrong.first_wrong.endswith(place)
    assert ("rows inside windows" if wrong is found.inside else "rows between batches") in found.wrong


def test_flags_are_compared_with_what_rows_do():
    batches = [rows((0, 0, 1), (1, 0, 1)), rows((0, 1), (2, 0)), rows((0, 2, 1), (2, 1)), rows((0, 5, 1), (2, 2))]
    found = audit(lambda: batches, **FLAGS, epochs=1)
    assert found.flags == (4, 1, 1)
    assert found.between.kinds == {"goes on": 4, "starts a stream": 1, "is reset in the middle": 1}
    assert found.between.right == 6
    assert found.wrong == ["start flags"]


def test_flags_of_rows_are_those_of_the_first_time_step():
    batches = [rows((0, 0), (1, 0), (0, 1), (1, 1), time_steps=2), rows((2, 0), (1, 2), (2, 1), (1, 3), time_steps=2)]
    reset = iter([[True, True], [True, False]])
    found = audit(lambda: batches, **KEYS, starts=lambda _: torch.tensor(next(reset)), epochs=1)
    assert found.flags == (6, 0, 0)
    assert found.wrong == []


def test_what_is_delivered_is_counted_over_ranks_and_epochs():
    one = [rows((0, 0), (1, 0)), rows((0, 1), (1, 1))]
    other = [rows((2, 0), (0, 0)), rows((2, 1), (0, 1)), rows((2, 2), None)]
    found = audit([lambda: one, lambda: other], **KEYS, total=8)
    assert (found.ranks, found.rank_batches, found.on_several_ranks) == (2, [2, 3], 2)
    assert (found.delivered, found.delivered_in_all, found.repeats) == (7, 7, 2)
    assert found.padding == 1 / 10
    assert found.wrong == ["delivered", "read again", "epochs", "batches of ranks", "items on two ranks"]
    assert lines_of(found)["delivered"] == "7 items in the first epoch, 87.5 % of 8; 7 in all 2 epochs"


def test_ids_may_be_texts_and_cells_may_be_masked():
    names = [np.array(["a", "b", None], object), np.array(["a", "c", "b"], object)]
    masks = iter([[True, True, True], [True, False, True]])
    found = audit(lambda: iter([names[0], names[1]]), ids=lambda b: b, mask=lambda _: np.array(next(masks)), epochs=1)
    assert found.between.kinds == {"goes on": 1}
    assert found.padding == 2 / 6
    assert found.wrong == []


def test_positions_may_go_on_by_any_distance():
    batches = [rows((0, n)) for n in (0, 3, 4, 9)]
    assert audit(lambda: batches, **KEYS, epochs=1).between.right == 1
    assert audit(lambda: batches, **KEYS, epochs=1, stride=None).wrong == []
    assert audit(lambda: batches[:2], **KEYS, epochs=1, stride=3).wrong == []


@pytest.mark.parametrize("fresh", [True, False])
def test_numbers_that_are_drawn_alike_in_each_epoch_are_found(fresh):
    """As with a generator that is made anew from the same seed wherever a worker starts."""

    def read(n):
        generator = np.random.default_rng(None if fresh else n)
        for i in range(n):
            yield {"at": i, "noise": generator.random(3)}

    loader = StreamDataLoader(StreamDataset(range(2, 8), read, 2, time_steps=2, shuffle=True, seed=0), 2)
    found = audit(loader, random=lambda batch: batch.data["noise"])
    assert found.same_random == (0 if fresh else 1)
    assert found.wrong == ([] if fresh else ["random numbers"])


def test_batches_of_several_sizes_are_named():
    found = audit(lambda: [rows((0, 0), (1, 0)), rows((0, 1))], **KEYS, epochs=1)
    assert found.batch_sizes == {2: 1, 1: 1}
    assert found.wrong == ["sizes of batches"]


@pytest.mark.parametrize(
    ("loader", "options", "error", "text"),
    [
        (lambda: [{"x": 1}], {}, TypeError, "batch 0 is a dict; give ids="),
        (iter([rows((0, 0))]), KEYS, ValueError, "a list_iterator can be read once; give a function"),
        (
            lambda: [rows((0, 0), (1, 0))],
            KEYS | {"positions": lambda b: b[1][:, :1]},
            ValueError,
            r"positions of batch 0 has shape \(1, 1\); .* as ids \(1, 2\)",
        ),
        (lambda: [rows((0, 0))], KEYS | {"epochs": 0}, ValueError, "epochs"),
    ],
)
def test_what_cannot_be_audited_is_told(loader, options, error, text):
    with pytest.raises(error, match=text):
        audit(loader, **options)


def test_a_loader_without_batches_is_not_right():
    assert audit(list, **KEYS).wrong == ["delivered", "epochs"]


PROGRAM = """
from torch.utils.data import DataLoader
from stream_dataloader import StreamDataLoader, StreamDataset

def ours():
    return StreamDataLoader(StreamDataset(range(1, 7), range, 2, time_steps=2, shuffle=True, seed=0))

def plain():
    frames = [(episode, frame) for episode in range(4) for frame in range(6)]
    return dict(loader=DataLoader(frames, 4), ids=lambda b: b[0], positions=lambda b: b[1], epochs=1)

def broken():
    raise RuntimeError("no data")
"""


def test_the_command_line_audits_what_a_function_returns(run, tmp_path, monkeypatch):
    (tmp_path / "audited_loaders.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("audit", "audited_loaders:ours")
    assert (status, out.splitlines()[-1]) == (0, "  rows go on, and each item is read once")
    status, out, _ = run("audit", "audited_loaders:plain", "--json")
    assert (status, json.loads(out)["between"]["moves"]) == (1, 20)
    status, out, _ = run("audit", "audited_loaders:ours", "--batches", "2", "--epochs", "3")
    assert (status, out.splitlines()[0]) == (0, "audited_loaders:ours (ranks: 1, epochs: 3)")
    status, _, err = run("audit", "audited_loaders:broken")
    assert status == 1
    assert "RuntimeError: no data" in err
    for name, text in (
        ("audited_loaders:nothing", "nothing"),
        ("videos/", "MODULE:FUNCTION"),
        ("nowhere:x", "nowhere"),
    ):
        status, _, err = run("audit", name)
        assert (status, text in err, err.count("\n")) == (2, True, 1)
