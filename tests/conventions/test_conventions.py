"""A batch under others' names: their definitions, written as plain loops, give each stream what it gives alone.

The recurrence is the same everywhere: h = 0.9 h + x, from 0 at a stream's start. What differs is how a consumer is told
where streams start and what the state before a window is.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
import windows_of_streams
from windows_of_streams import LANES, LENGTHS, STEPS, WINDOWS, opening

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info, recurrent
from stream_dataloader.recurrent import RecurrentState

ALL_WINDOWS = pytest.mark.parametrize("windows", ["aligned", "packed", "the streams' own"])


def value(source, position):
    return np.sin(1.0 + 10 * source + position)


open_stream = opening(lambda source: [value(source, i) for i in range(LENGTHS[source])])


def open_windows(length):
    """Windows of 5, 2, 5, 2, ... steps: those of 2 are padded while the stream goes on."""
    source, first = get_stream_info().source_index, 0
    while first < length:
        steps = STEPS if first % 7 == 0 else 2
        yield np.array([value(source, i) for i in range(first, min(length, first + steps))])
        first += steps


def batches_of(windows="packed", **more):
    if windows == "the streams' own":
        return windows_of_streams.batches_of(open_windows, "given", time_steps=None, fill_value=1e6, **more)
    return windows_of_streams.batches_of(open_stream, windows, fill_value=1e6, **more)


def alone(source, h):
    """What a stream gives by itself, from a state on."""
    return [h := 0.9 * h + value(source, i) for i in range(LENGTHS[source])]


def differing(batch, outputs, start=0.0):
    """How many items have other outputs `(T, B)` than their stream has alone."""
    expected = [alone(source, start) for source in range(len(LENGTHS))]
    return windows_of_streams.differing(batch, outputs, expected, 1e-6)


def sequences(data, seq_idx, initial, decay=None):
    """Mamba-2, as its kernels have it: index 0 goes on from the initial state, any change of index starts at zero."""
    h, index, outputs = initial.clone(), torch.zeros(len(data), dtype=torch.int32), []
    for t in range(data.shape[1]):
        h = torch.where(seq_idx[:, t] == index, h, 0.0)
        index = seq_idx[:, t]
        h = (0.9 if decay is None else decay[:, t]) * h + data[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1), h


def varlen(row, cu_seqlens, initial):
    """flash-linear-attention: each sequence goes on from its initial state, and has a final one."""
    assert row.shape[0] == 1
    outputs, final = torch.zeros_like(row), torch.zeros(len(cu_seqlens) - 1, dtype=row.dtype)
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        h = 0.0 if initial is None else initial[n]
        for i in range(begin, end):
            h = 0.9 * h + row[0, i]
            outputs[0, i] = h
        final[n] = h
    return outputs, final


@WINDOWS
def test_dreamer_zeroes_its_state_at_is_first(windows):
    carry = torch.zeros(LANES)
    for batch in batches_of(windows):
        is_first, data, outputs = batch.is_first.T, batch.data.T, []
        assert is_first.dtype == torch.bool
        assert is_first.shape == (LANES, STEPS)
        for t in range(STEPS):
            carry = 0.9 * carry * ~is_first[:, t] + data[:, t]
            outputs.append(carry)
        assert not differing(batch, torch.stack(outputs))


@WINDOWS
def test_mamba_goes_on_in_sequence_0_and_starts_anew_in_all_others(windows):
    state = shifted = torch.zeros(LANES, dtype=torch.float64)
    wrong = 0
    for batch in batches_of(windows):
        seq_idx, data = recurrent.seq_idx(batch), batch.data.T
        assert seq_idx.dtype == torch.int32
        assert seq_idx.is_contiguous()
        outputs, state = sequences(data, seq_idx, state)
        assert not differing(batch, outputs.T)
        renumbered, shifted = sequences(data, seq_idx - seq_idx[:, :1], shifted)
        wrong += differing(batch, renumbered.T)
    assert wrong  # numbers from 0 in each lane give started lanes the state of the stream before


@ALL_WINDOWS
def test_segments_start_with_the_value_of_a_recurrent_state_and_give_back_what_it_keeps(windows):
    start = torch.full((1,), 3.0, dtype=torch.float64)
    carry = RecurrentState(start, batch_dim=0, packed=True)
    for batch in batches_of(windows):
        segments, row = recurrent.segments(batch), batch.flatten_lanes(batch.data)
        cuts = segments.cu_seqlens
        assert (cuts.dtype, cuts[0], cuts[-1]) == (torch.int32, 0, batch.mask.numel())
        assert 0 < cuts.diff().min() <= cuts.diff().max() <= batch.time_steps
        assert segments.is_padding.equal(batch.flatten_lanes(batch.source_index)[0, cuts[:-1]] < 0)
        initial = segments.to_segments(carry.before(batch), start)
        outputs, final = varlen(row, segments.cu_seqlens, initial)
        carry.after(batch, segments.to_lanes(final, before=None))
        assert not differing(batch, batch.unflatten_lanes(outputs), 3.0)


@ALL_WINDOWS
@pytest.mark.parametrize("loop", ["segments", "Mamba-2"])
def test_loops_by_hand_keep_the_state_of_late_lanes(loop, windows):
    state, late = None, 0
    for batch in windows_of_streams.with_late_lanes(batches_of(windows), 1e6):
        if loop == "segments":
            segments = recurrent.segments(batch)
            row, final = varlen(batch.flatten_lanes(batch.data), segments.cu_seqlens, segments.to_segments(state))
            outputs, state = batch.unflatten_lanes(row), segments.to_lanes(final, before=state)
        else:  # with A = log 0.9, h = exp(dt A) h + dt x
            dt = (batch.source_index >= 0).T.double()
            state = torch.zeros(LANES, dtype=torch.float64) if state is None else state
            outputs, state = sequences(dt * batch.data.T, recurrent.seq_idx(batch), state, 0.9**dt)
            outputs = outputs.T
        assert not differing(batch, outputs)
        late += int((batch.source_index < 0).all(0).sum())
    assert late > 10


@WINDOWS
def test_position_ids_count_in_segments_or_in_streams(windows):
    for batch in batches_of(windows):
        counted = [i for length in recurrent.cu_seqlens(batch).diff().tolist() for i in range(length)]
        assert recurrent.position_ids(batch).tolist() == [counted]
        assert (
            recurrent.position_ids(batch, "stream").tolist()
            == batch.flatten_lanes(batch.position.clamp(min=0)).tolist()
        )
        assert recurrent.position_ids(batch).dtype == recurrent.position_ids(batch, "stream").dtype == torch.int64


@WINDOWS
def test_flags_of_each_step_have_the_shapes_and_dtypes_of_their_consumers(windows):
    for batch in batches_of(windows):
        assert recurrent.is_init(batch).shape == (LANES, STEPS, 1)
        assert recurrent.is_init(batch).squeeze(-1).T.equal(batch.is_first)
        assert recurrent.prev_exists(batch).T.equal(
            (~batch.is_first).float()
        )  # a factor: a memory's dtype is made of it
        with pytest.raises(ValueError, match="mark_ends=True"):
            recurrent.done(batch)


@ALL_WINDOWS
def test_done_marks_the_last_item_of_each_stream(windows):
    marked = []
    for batch in batches_of(windows, mark_ends=True):
        done = recurrent.done(batch)
        assert (done.shape, done.dtype) == ((LANES, batch.time_steps, 1), torch.bool)
        source, position = batch.source_index.T[done.squeeze(-1)], batch.position.T[done.squeeze(-1)]
        marked += zip(source.tolist(), position.tolist(), strict=True)
    assert sorted(marked) == [(source, length - 1) for source, length in enumerate(LENGTHS)]


def test_parts_have_their_own_lanes():
    dataset = StreamDataset(LENGTHS, open_stream, LANES, time_steps=STEPS, windows="packed")
    state = {}
    for part in StreamDataLoader(dataset, num_workers=2).parts():
        segments = recurrent.segments(part)
        assert segments.last.shape == (2,)
        initial = segments.to_segments(state.get(part.worker))
        outputs, final = varlen(part.flatten_lanes(part.data), segments.cu_seqlens, initial)
        state[part.worker] = segments.to_lanes(final, before=state.get(part.worker))
        assert not differing(part, part.unflatten_lanes(outputs))


def test_a_moved_batch_answers_on_its_device_by_what_it_keeps_in_host_memory():
    batch = batches_of(mark_ends=True)[1]
    there = batch.to("meta")  # a device that cannot be looked at
    for name in ("is_init", "done", "prev_exists", "seq_idx", "cu_seqlens", "position_ids"):
        answer, here = getattr(recurrent, name)(there), getattr(recurrent, name)(batch)
        assert answer.device.type == "meta"
        assert (answer.shape, answer.dtype) == (here.shape, here.dtype)
    segments = recurrent.segments(there)
    assert {getattr(segments, name).device.type for name in ("row", "continues", "is_padding", "last")} == {"meta"}
    assert segments.to_segments(torch.zeros(LANES, 2, device="meta")).shape == (len(segments.row), 2)


def test_results_are_the_callers_own_and_lanes_lie_end_to_end_whatever_the_shape():
    batch = batches_of()[0]
    before = batch.is_first.clone(), batch.position.clone()
    for result in (recurrent.is_init(batch), recurrent.position_ids(batch, "stream")):
        result.fill_(True)
    assert batch.is_first.equal(before[0])
    assert batch.position.equal(before[1])
    images = torch.rand(STEPS, LANES, 3, 2)
    row = batch.flatten_lanes(images)
    assert row.shape == (1, LANES * STEPS, 3, 2)
    assert row[0, STEPS + 2].equal(images[2, 1])
    assert batch.unflatten_lanes(row).equal(images)


def test_streams_start_with_a_value_of_the_users():
    batch = batches_of()[1]
    segments, carried = recurrent.segments(batch), torch.arange(2.0 * LANES).reshape(LANES, 2) + 1
    start = torch.tensor([[0.5, 0.25]], requires_grad=True)
    initial = segments.to_segments(carried, start)
    for n, goes_on in enumerate(segments.continues.tolist()):
        assert initial[n].tolist() == (carried[segments.row[n]].tolist() if goes_on else [0.5, 0.25])
    assert segments.to_segments(None, start).tolist() == [[0.5, 0.25]] * len(segments.row)
    assert segments.to_segments(None) is None
    initial.sum().backward()
    assert start.grad.tolist() == [[float((~segments.continues).sum())] * 2]


@pytest.mark.parametrize(
    ("ask", "error", "told"),
    [
        (lambda b, s: b.flatten_lanes(torch.zeros(4, 5)), ValueError, r"begins with \(5, 4\), and got \(4, 5\)"),
        (lambda b, s: b.flatten_lanes({"x": torch.zeros(5, 4)}), TypeError, "dict"),
        (lambda b, s: b.unflatten_lanes(torch.zeros(20, 3)), ValueError, r"\(1, 20\), and got \(20, 3\)"),
        (lambda b, s: recurrent.position_ids(b, "lane"), ValueError, "lane"),
        (lambda b, s: s.to_segments(torch.zeros(3, 2)), ValueError, r"4 lanes, but the state is \(3, 2\)"),
        (lambda b, s: s.to_lanes(torch.zeros(99), before=None), ValueError, r"segments, but the state is \(99,\)"),
        (lambda b, s: s.to_lanes((torch.zeros(99), torch.zeros(99)), before=None), TypeError, "tuple"),
        (lambda b, s: s.to_lanes(torch.zeros(len(s)), before=torch.zeros(3)), ValueError, r"4 lanes, but the state is"),
        (lambda b, s: s.to_segments(None, 0.5), ValueError, "start"),
    ],
)
def test_what_is_no_tensor_of_the_batch_is_refused(ask, error, told):
    batch = batches_of()[0]
    segments = recurrent.segments(batch)
    with pytest.raises(error, match=told):
        ask(batch, segments)
