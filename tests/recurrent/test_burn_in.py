"""Burn-in counts from where a lane's state began, whatever stream, section or marked sequence that was."""

import numpy as np
import pytest
import torch
from carried import counted, through_file
from cases import Counting

from stream_dataloader import Sections, StateError, StreamDataLoader, StreamDataset, merge_states, stores
from stream_dataloader.recurrent import RecurrentState

N = 2  # steps of burn-in
SOURCES = [(0, 7), (1, 2), (2, 12), (3, 5), (4, 9)]


def dataset_of(kind, folder):
    options = {"time_steps": 4, "seed": 0, "windows": "aligned" if kind == "aligned" else "packed"}
    if kind == "documents of a token file":
        np.tile([5, 6, 7, 8, 9, 0, 4, 0], 20).astype(np.uint16).tofile(folder / "tokens.bin")
        sources, open_tokens = stores.open(folder / "tokens.bin", stored_dtype="uint16", dtype="int64", eos_token=0)
        return StreamDataset(sources, open_tokens, 2, sections=Sections(30, jitter=True), **options)
    if kind == "again and again":
        return StreamDataset(SOURCES, Counting(), 2, "cycle", **options)
    cut = Sections(5, jitter=True, lengths=[length for _, length in SOURCES]) if kind == "sections" else None
    return StreamDataset(SOURCES, Counting(marks=kind == "marked sequences"), 2, sections=cut, **options)


def counted_by_hand(batches, cold_before=()):
    """Where the loss counts, `(T, B)` a batch: a lane's first items after a start, and a cold one's, do not."""
    ages, masks = {}, []
    for number, batch in enumerate(batches):
        mask = torch.zeros_like(batch.mask)
        for row, lane in enumerate(batch.lane.tolist()):
            age = 0 if number in cold_before else ages.get(lane, 0)
            for t in range(batch.time_steps):
                if batch.source_index[t, row] < 0:
                    continue
                age = 0 if batch.is_first[t, row] else age
                mask[t, row] = batch.mask[t, row] and age >= N
                age += 1
            ages[lane] = age
        masks.append(mask)
    return masks


KINDS = ["aligned", "sections", "marked sequences", "documents of a token file", "again and again"]


@pytest.mark.parametrize("asked", ["ahead", "between", "behind"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_items_of_each_state_do_not_count(kind, asked, tmp_path):
    batches = [batch for _, batch in zip(range(14), StreamDataLoader(dataset_of(kind, tmp_path)), strict=False)]
    expected = counted_by_hand(batches, cold_before=[9])
    assert any(mask.any() for mask in expected)
    carry = RecurrentState(batch_dim=0, burn_in=N, packed=True)
    for number, (batch, mask) in enumerate(zip(batches, expected, strict=True)):
        if number == 5:  # another process goes on, which knows the saved state only
            state = through_file(merge_states([carry.state_dict()]))
            carry = RecurrentState(batch_dim=0, burn_in=N, packed=True)
            carry.load_state_dict(state)
        if number == 9:
            carry.reset()
        found = carry.loss_mask(batch) if asked == "ahead" else None
        for part in batch.split_lanes(2) if number % 3 == 1 else [batch]:
            state = carry.before(part)
            found = carry.loss_mask(batch) if asked == "between" else found
            carry.after(part, torch.zeros(len(part), 1) if state is None else state)
        found = carry.loss_mask(batch) if asked == "behind" else found
        assert torch.equal(found, mask), f"batch {number}: {found.T.int().tolist()}, and not {mask.T.int().tolist()}"


def test_a_state_that_began_anew_after_nan_burns_in_again():
    carry = RecurrentState(batch_dim=0, burn_in=N, nonfinite="reset")
    first, second = StreamDataLoader(StreamDataset([8, 8], lambda n: torch.ones(n, 1), 2, time_steps=4))
    carry.after(first, counted(first, None) * torch.tensor([[1.0], [torch.nan]]))
    with pytest.warns(RuntimeWarning, match="lane 1 goes on"):
        carry.before(second)
    assert carry.loss_mask(second).T.int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


def test_lanes_that_are_reset_before_their_first_batch_burn_in():
    carry = RecurrentState(batch_dim=0, burn_in=N)
    _, second = StreamDataLoader(StreamDataset([8, 8], lambda n: torch.ones(n, 1), 2, time_steps=4))
    carry.reset()
    assert carry.loss_mask(second).T.int().tolist() == [[0, 0, 1, 1]] * 2


def test_a_batch_whose_count_is_not_known_is_refused():
    carry = RecurrentState(batch_dim=0, burn_in=N)
    first, second, third = StreamDataLoader(StreamDataset([12, 12], lambda n: torch.ones(n, 1), 2, time_steps=4))
    with pytest.raises(StateError, match="no state is kept for it"):
        carry.loss_mask(second)
    for batch in (first, second, third):
        carry.after(batch, counted(batch, carry.before(batch)))
    with pytest.raises(StateError, match="pass each batch to before"):
        carry.loss_mask(second)
    assert carry.loss_mask(third).all()
    other = RecurrentState(batch_dim=0)  # it does not count, so what it saves is past any burn-in
    other.after(first, counted(first, None))
    carry.load_state_dict(other.state_dict())
    assert carry.loss_mask(second).all()
