"""What a batch says of its cells is made of a few numbers; a loop over the cells finds the same."""

import pytest
from cases import MODES, Case, cases
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, recurrent
from stream_dataloader._engine.assembly.part import Run
from stream_dataloader._engine.items.bookkeeping import Bookkeeping

FIELDS = "is_first", "mask", "source_index", "position", "is_padding", "reset"
FUNCTIONS = "seq_idx", "cu_seqlens", "segments", "position_ids"
KINDS = ["batches", "parts", "micro-batches", "moved"]


def answers(batch, order):
    """All that can be asked of a batch, asked in an order."""
    return {
        name: getattr(batch, name) if name in FIELDS else getattr(recurrent, name)(batch)
        for name in (FIELDS + FUNCTIONS)[order:] + (FIELDS + FUNCTIONS)[:order]
    }


def looped(lanes):
    """The same of lanes of cells, each a tuple of source, position, mask and start, or None; one cell after another."""
    padding = -1, -1, False, False
    columns = [list(zip(*[cell[:4] if cell else padding for cell in cells], strict=True)) for cells in lanes]
    source, position, mask, is_first = ([list(column[i]) for column in columns] for i in range(4))
    counted, begins, continues, within, last = [], [], [], [], []
    for row, cells in enumerate(lanes):
        starts = 0
        for t, cell in enumerate(cells):
            if t == 0 or (cell is None) != (cells[t - 1] is None) or (cell and cell[3]):
                begins.append(row * len(cells) + t)
                continues.append(t == 0 and cell is not None and not cell[3])
            starts += bool(cell and cell[3])
            counted.append(starts)
            within.append(row * len(cells) + t - begins[-1])
        own = [n for n, begin in enumerate(begins) if begin // len(cells) == row]
        last.append(max([n for n in own if cells[begins[n] % len(cells)]], default=own[-1]))
    return {
        "is_first": is_first,
        "mask": mask,
        "source_index": source,
        "position": position,
        "is_padding": [[cell is None for cell in cells] for cells in lanes],
        "reset": [flags[0] for flags in is_first],
        "seq_idx": counted,
        "cu_seqlens": [*begins, len(counted)],
        "position_ids": [within],
        "continues": continues,
        "row": [begin // len(lanes[0]) for begin in begins],
        "last": last,
    }


def check(batch, order, expected):
    found = answers(batch, order)
    segments = found.pop("segments")
    found |= {"continues": segments.continues, "row": segments.row, "last": segments.last}
    found["seq_idx"] = found["seq_idx"].flatten()
    by_lane = {name: tensor.T if name in FIELDS and tensor.ndim == 2 else tensor for name, tensor in found.items()}
    told = {name: tensor.tolist() for name, tensor in by_lane.items()}
    assert told == looped([expected[lane] for lane in batch.lane.tolist()])
    assert segments.cu_seqlens.equal(found["cu_seqlens"])
    for name in FIELDS:
        assert found[name].is_contiguous() or batch.lane.numel() < len(expected)


def test_what_is_made_for_compiled_code_is_what_is_made_of_runs():
    runs = [
        Run(2, 0, 2, 7, 3, True, False, 11),
        Run(2, 2, 1, 8, 0, True, True, 12),
        Run(3, 0, 2, 9, 5, False, True, 13),
    ]
    books = Bookkeeping([[number for run in runs for number in run]], range(2, 4), 4)
    traced = books._traced()
    assert {*traced} == {"is_first", "reset", "mask", "source_index", "position", "stream_seed"}
    for name, tensor in traced.items():
        assert tensor.tolist() == books(name)[name].tolist(), name


def check_seeds(batch):
    """Each source has one seed, and padding has 0."""
    seeds = dict(zip(batch.source_index.flatten().tolist(), batch.stream_seed.flatten().tolist(), strict=True))
    assert seeds.get(-1, 0) == 0
    for source, seed in seeds.items():
        assert (batch.stream_seed[batch.source_index == source] == seed).all()
        assert seed or source == -1


@random_cases(500, 8)
@given(
    case=cases(max_length=40, modes=MODES, marks=True),
    time_steps=st.integers(1, 30),
    order=st.integers(0, len(FIELDS + FUNCTIONS) - 1),
    workers=st.integers(0, 3),
    kind=st.sampled_from(KINDS),
)
def test_a_batch_says_of_its_cells_what_a_loop_over_them_finds(case, time_steps, order, workers, kind):
    case.time_steps = time_steps
    loader = StreamDataLoader(case.dataset(), min(workers, case.lanes), worker_method="thread")
    expected = list(case.expected(loader.dataset))
    for batch in loader.parts() if kind == "parts" else loader:
        if kind == "micro-batches":
            pieces = batch.split_lanes(min(len(batch), 1 + order))
        else:
            pieces = [batch.to("meta").host if kind == "moved" else batch]
        for piece in pieces if batch.batch_index < len(expected) else ():  # parts may read beyond the last batch
            check(piece, order, expected[batch.batch_index])
            check_seeds(piece)


@pytest.mark.parametrize("name", ["seq_idx", "cu_seqlens", "is_padding"])
def test_what_a_user_wrote_into_a_field_counts(name):
    (batch,) = StreamDataLoader(Case([3, 3], 2, 3).dataset())
    batch.is_first[1, 0] = True
    batch.source_index[2, 1] = -1
    expected = {
        "seq_idx": [[1, 2, 2], [1, 1, 1]],
        "cu_seqlens": [0, 1, 3, 5, 6],
        "is_padding": [[False] * 3, [False, False, True]],
    }
    found = batch.is_padding.T if name == "is_padding" else getattr(recurrent, name)(batch)
    assert found.tolist() == expected[name]
