"""`RecurrentState.before` and `after`: what they give, keep and refuse."""

import copy
import dataclasses

import pytest
import torch
from carried import Named, Pair, counted, ones, through_file
from torch import nn

from stream_dataloader import StateError, StreamDataLoader, StreamDataset
from stream_dataloader.errors import NonFiniteStateError, StreamError
from stream_dataloader.recurrent import RecurrentState, linear_scan, masked_rnn


def loader_of(lengths, lanes=2, time_steps=2, **options):
    return StreamDataLoader(StreamDataset(lengths, ones, lanes, time_steps=time_steps, **options))


def run(carry, batches):
    found = []
    for batch in batches:
        state = counted(batch, carry.before(batch))
        carry.after(batch, state)
        found.append(state.flatten().tolist())
    return found


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, 2 * x),
        lambda x: [x, None, (x, x)],
        lambda x: {"z": x, "a": [x, {1: x}]},
        lambda x: Pair(x, (x, None)),
        lambda x: Named(x, x),
    ],
)
def test_a_state_comes_back_in_its_structure(wrap):
    carry, batches = RecurrentState(batch_dim=0), iter(loader_of([5, 2, 4]))
    first = next(batches)
    assert carry.before(first) is None
    carry.after(first, wrap(torch.tensor([[2.0], [3.0]])))
    resumed = RecurrentState(batch_dim=0)
    resumed.load_state_dict(through_file(carry.state_dict()))
    assert resumed.state_dict()["structure"] == carry.state_dict()["structure"]
    second = next(batches)  # in which lane 1 starts a stream
    for each in (carry, resumed):
        assert repr(each.before(second)) == repr(wrap(torch.tensor([[2.0], [0.0]])))


def test_lanes_without_an_item_keep_what_they_had():
    carry, states = RecurrentState(batch_dim=0), []
    for batch in loader_of([6, 1, 2]):
        state = counted(batch, carry.before(batch))
        idle = (batch.source_index < 0).all(0)
        states.append((idle.tolist(), state.flatten().tolist()))
        carry.after(batch, state.masked_fill(idle[:, None], float("nan")))
    assert [idle for idle, _ in states] == [[False, False], [False, False], [False, True]]
    assert states[-1][1] == [6, 2]
    assert carry.state_dict()["leaves"][0].tolist() == [[6], [2]]  # no NaN of the lane that idled


def test_nothing_changes_by_asking_and_nothing_is_changed_in_place():
    carry, given = RecurrentState(batch_dim=0), []
    for batch in loader_of([5, 2, 4, 1, 3]):
        state = carry.before(batch)
        assert state is None or torch.equal(state, carry.before(batch))
        new = counted(batch, state)
        given += [(tensor, tensor.clone()) for tensor in (state, new) if tensor is not None]
        carry.after(batch, new)
    assert all(torch.equal(tensor, copy) for tensor, copy in given)


def test_a_saved_state_and_what_is_carried_share_no_memory():
    batches, carry = list(loader_of([9, 9])), RecurrentState(batch_dim=0)
    run(carry, batches[:1])
    later = carry._snapshot()
    run(carry, batches[1:2])
    assert run(later, batches[1:3]) == [[4, 4], [6, 6]], "a snapshot is as of its batch"
    saved = carry.state_dict()
    carry.before(batches[2]).zero_()  # by a model that computes in place
    assert saved["leaves"][0].tolist() == [[4], [4]]
    saved["leaves"][0].fill_(-1)
    assert carry.before(batches[2]).tolist() == [[0], [0]]


def test_what_is_kept_is_no_view_of_what_the_model_returned():
    carry, (first, second) = RecurrentState(batch_dim=0), loader_of([4, 4])
    outputs = torch.ones(9, 2, 1)
    carry.after(first, outputs[-1])
    outputs.zero_()
    kept = carry.before(second)
    assert kept.tolist() == [[1], [1]]
    assert kept.untyped_storage().nbytes() == 2 * 4


def test_a_given_state_begins_each_stream():
    for given in (torch.tensor([[10.0]]), lambda batch: torch.full((len(batch), 1), 10.0)):
        assert run(RecurrentState(given, batch_dim=0), loader_of([5, 2, 4])) == [[12, 12], [14, 12], [15, 14]]


def test_a_learnt_state_gets_the_gradient_of_the_streams_that_start():
    start = nn.Parameter(torch.full((1, 1), 3.0))
    for initial in (start, lambda batch: start.expand(len(batch), 1)):
        carry, gradients = RecurrentState(initial, batch_dim=0), []
        for batch in loader_of([5, 2, 4]):
            start.grad = None
            state = counted(batch, carry.before(batch))
            (state * torch.tensor([[1.0], [10.0]])).sum().backward()
            gradients.append(start.grad.item())  # also where no stream starts, which DistributedDataParallel needs
            carry.after(batch, state)
        assert gradients == [11, 10, 0]
    lstm, start = nn.LSTM(1, 3, 2), nn.Parameter(torch.zeros(2, 1, 3))
    carry = RecurrentState((start, start), batch_dim=1)
    for batch in loader_of([5, 2, 4]):
        state = carry.before(batch)
        assert all(tensor.is_contiguous() for tensor in state), "cuDNN takes no other"
        carry.after(batch, lstm(batch.data, state)[1])


def test_the_dimension_of_lanes_is_found_or_given():
    batch = next(iter(loader_of([2, 2, 2], lanes=3)))
    carry = RecurrentState()
    carry.after(batch, (torch.zeros(2, 3, 4), torch.zeros(3, 4)))
    assert repr(carry) == "RecurrentState(3 lanes: state[0] (2, B, 4), state[1] (B, 4))"
    carry = RecurrentState(batch_dim={"lstm": 1, "map": -3})
    carry.after(batch, {"lstm": (torch.zeros(3, 3, 4),) * 2, "map": torch.zeros(3, 3, 5)})
    assert "state['map'] (B, 3, 5)" in repr(carry)


@pytest.mark.parametrize(
    ("batch_dim", "state", "error", "text"),
    [
        (None, torch.zeros(3, 3, 4), ValueError, "dimension 0 or 1.*batch_dim"),
        (None, {"a": torch.zeros(2, 4)}, ValueError, r"state\['a'\] is \(2, 4\)"),
        (0, torch.zeros(2, 3, 4), ValueError, "dimension 0.*dimension 1 has"),
        ({"other": 1}, {"lstm": torch.zeros(3, 3, 4)}, ValueError, "batch_dim is {'other': 1}"),
        (None, (torch.zeros(3, 1), 7), TypeError, r"state\[1\] is a int"),
        (
            None,
            torch.eye(3).to_sparse(),
            TypeError,
            r"state is a tensor of layout torch.sparse_coo; a state holds dense",
        ),
        (None, (), ValueError, "no tensor"),
        (None, None, ValueError, "no tensor"),
        (None, [None], ValueError, "no tensor"),
    ],
)
def test_a_state_must_have_tensors_with_a_row_for_each_lane(batch_dim, state, error, text):
    with pytest.raises(error, match=text):
        RecurrentState(batch_dim=batch_dim).after(next(iter(loader_of([2, 2, 2], lanes=3))), state)


def test_lanes_that_are_reset_begin_with_the_initial_value():
    batches, carry = list(loader_of([9, 9])), RecurrentState(torch.full((1, 1), 10.0), batch_dim=0)
    assert run(carry, batches[:2]) == [[12, 12], [14, 14]]
    carry.reset([1])
    assert run(carry, batches[2:4]) == [[16, 12], [18, 14]]
    with pytest.raises(ValueError, match="lane -1"):
        carry.reset([0, -1])


@pytest.mark.parametrize("size", [4, 1])
def test_an_initial_value_must_fit_the_state(size):
    first, second, *_ = loader_of([4, 2, 2])
    carry = RecurrentState(torch.zeros(1, size), batch_dim=0)
    carry.after(first, torch.zeros(2, 5))
    with pytest.raises(ValueError, match=rf"initial value .*\(1, {size}\)"):
        carry.before(second)


def test_a_state_keeps_its_structure_and_shapes():
    carry, batches = RecurrentState(batch_dim=0), iter(loader_of([6, 6]))
    carry.after(next(batches), {0: torch.zeros(2, 4), 1: torch.zeros(2, 4)})
    batch = next(batches)
    for state, text in [
        (torch.zeros(2, 4), "structure"),
        ({0: torch.zeros(2, 4), 1: torch.zeros(3, 4)}, r"state\[1\] is \(3, 4\), but the batch has 2 lanes"),
        ({0: torch.zeros(2, 4), 1: torch.zeros(2, 5)}, r"state\[1\] of shape \(1, 5\).* is \(1, 4\).* at a fixed size"),
        ({0: torch.zeros(2, 4), 1: torch.zeros(2, 3)}, r"here it is \(1, 4\) \(1 for the lanes\)$"),
        ({0: torch.zeros(2, 4), 1: None}, r"state\[1\] is a tensor in the state kept, and None .* give it a tensor"),
        ({0: torch.zeros(2, 4)}, r"state\[1\] is a tensor in the state kept, and None or missing"),
    ]:
        with pytest.raises(StateError, match=text):
            carry.after(batch, state)
    carry.after(batch, {1: torch.zeros(2, 4), 0: torch.zeros(2, 4)})  # keys in another order


def test_an_initial_none_that_becomes_a_tensor_is_named():
    carry, batches = RecurrentState((torch.zeros(1, 4), None), batch_dim=0), iter(loader_of([6, 6]))
    batch = next(batches)
    hidden, memory = carry.before(batch)
    assert memory is None
    with pytest.raises(StateError, match=r"state\[1\] is a tensor in the state returned, and None .* initial"):
        carry.after(batch, (hidden, torch.zeros(2, 3)))


def test_gradients_go_back_as_many_windows_as_are_asked_for():
    gru = nn.GRU(1, 3).double()
    data = torch.randn(8, 2, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradients(time_steps, detach_every):
        carry, found, losses = RecurrentState(batch_dim=1, detach_every=detach_every), [], []
        for batch in loader_of([8, 8], time_steps=time_steps):
            window = data[time_steps * batch.batch_index :][:time_steps]
            output, state = gru(window, carry.before(batch))
            losses.append(output.square().sum())
            if carry.after(batch, state):
                gru.zero_grad()
                sum(losses).backward()
                losses.clear()
                found.append(torch.cat([p.grad.flatten() for p in gru.parameters()]))
        assert not losses
        return torch.stack(found)

    batches = list(loader_of([9, 9]))
    carry = RecurrentState(batch_dim=0, detach_every=3)
    ends = []
    for number, batch in enumerate(batches[:2]):  # lanes by themselves, of which one begins anew
        for part in batch.split_lanes(2):
            ends.append(carry.after(part, torch.ones(1, 1, requires_grad=True)))
        if not number:
            carry.reset([1])
    assert ends == [False] * 4
    with pytest.raises(StateError, match="gradients go back 2 of 3 windows"):
        carry.state_dict()
    assert carry.after(batches[2], torch.ones(2, 1, requires_grad=True)), "the lane that goes back farthest counts"

    carry = RecurrentState(batch_dim=0, detach_every=2)
    for part in (*batches[0].split_lanes(2), batches[1].split_lanes(2)[0]):
        carry.after(part, torch.ones(1, 1, requires_grad=True))
    with pytest.raises(StateError, match="gradients go back 1 of 2 windows"):  # of the second lane
        carry.state_dict()
    torch.testing.assert_close(gradients(2, 2), gradients(4, 1), rtol=0, atol=1e-12)
    assert not torch.allclose(gradients(4, 1)[-1], gradients(2, 1)[-1])


def test_a_batch_left_out_is_named_and_changes_nothing():
    batches, carry = list(loader_of([9, 9])), RecurrentState(batch_dim=0)
    run(carry, batches[:2])
    text = r"lane 0 goes on with source 0 at position 6 in batch 3 of epoch 0, .* after source 0, position 3"
    with pytest.raises(StateError, match=text):
        carry.before(batches[3])
    for each in (copy.deepcopy(carry), carry):
        assert run(each, batches[2:]) == [[6, 6], [8, 8], [9, 9]]


@pytest.mark.parametrize("lengths", [[9, 9], [2] * 8])  # also where each stream is one window
@pytest.mark.parametrize("numbers", [[0, 0], [0, 1, 1], [0, 2], [0, 1, 0, 0], [1], [0, 1, 3]])
def test_a_batch_left_out_or_given_twice_is_found(lengths, numbers):
    batches, carry = list(loader_of(lengths)), RecurrentState(batch_dim=0)
    run(carry, [batches[number] for number in numbers[:-1]])
    wrong = batches[numbers[-1]]
    with pytest.raises(StateError):
        carry.before(wrong)
    with pytest.raises(StateError):
        carry.after(wrong, torch.zeros(2, 1))


def test_a_batch_whose_streams_are_of_other_lanes_is_found():
    batches, carry = list(loader_of([9, 9])), RecurrentState(batch_dim=0)
    run(carry, batches[:1])
    others = {name: getattr(batches[1], name).flip(1) for name in ("source_index", "stream_seed")}
    with pytest.raises(StateError, match="lane 0 goes on with source 1 at position 2"):
        carry.before(dataclasses.replace(batches[1], **others))


def test_a_copy_or_a_micro_batch_given_twice_is_found():
    first, carry = next(iter(loader_of([2] * 8))), RecurrentState(batch_dim=0)
    micro = first.split_lanes(2)
    run(carry, micro)
    for again in (micro[1], first, copy.copy(first), first.to("cpu"), copy.copy(first).split_lanes(2)[0]):
        with pytest.raises(StateError):
            carry.before(again)


@pytest.mark.parametrize("parts", [1, 2])
def test_an_epoch_of_one_batch_may_be_read_again(parts):
    loader, carry = loader_of([2, 2]), RecurrentState(batch_dim=0)
    for _ in range(3):
        loader.set_epoch(0)
        for batch in loader:
            run(carry, batch.split_lanes(parts))


def test_batches_are_counted_after_a_resume_too():
    batches, carry = list(loader_of([2] * 8)), RecurrentState(batch_dim=0)

    def resumed(state):
        other = RecurrentState(batch_dim=0)
        other.load_state_dict(state)
        return other

    run(carry, batches[:2])
    state = carry.state_dict()
    resumed(state).before(batches[0])  # the first one of an epoch
    for number in (1, 3):
        with pytest.raises(StateError):
            resumed(state).before(batches[number])
    assert run(resumed(state), batches[2:]) == [[2, 2]] * 2
    with pytest.raises(StateError):
        resumed(state).before(list(loader_of([9, 9]))[2])
    with pytest.raises(StateError, match="the state has no 'epoch'"):
        resumed({name: value for name, value in state.items() if name != "epoch"})


def test_streams_that_go_on_without_a_state_are_found_unless_that_is_meant():
    batches, carry = list(loader_of([9, 9])), RecurrentState(batch_dim=0)
    with pytest.raises(StateError, match=r"no state is kept.*reset\(\)"):
        carry.before(batches[2])
    for carry in (carry, RecurrentState(batch_dim=0)):  # noqa: B020 - one that was asked, and one that knows no lane
        carry.reset()
        assert run(carry, batches[2:4]) == [[2, 2], [4, 4]]
    with pytest.raises(StateError):
        carry.before(batches[1])
    carry.reset([1])
    assert run(carry, batches[4:]) == [[5, 1]]


def test_a_new_epoch_begins_anew_however_it_is_numbered():
    loader, carry = loader_of([5, 2, 4]), RecurrentState(batch_dim=0)
    run(carry, [next(iter(loader))])  # of an epoch that is left
    assert run(carry, loader) == run(copy.deepcopy(carry), loader) == [[2, 2], [4, 2], [5, 4]]
    batches, carry = list(loader_of([9, 9])), RecurrentState(batch_dim=0)
    cut = [
        dataclasses.replace(batch, epoch=batch.batch_index // 2, batch_index=batch.batch_index % 2) for batch in batches
    ]
    assert run(carry, cut) == run(RecurrentState(batch_dim=0), batches)


def test_states_go_on_over_the_borders_of_epochs_of_n_batches():
    dataset = StreamDataset([5, 20, 9], ones, 2, time_steps=2, padding_mode="cycle", seed=0)
    loader, carry = StreamDataLoader(dataset, batches_per_epoch=3), RecurrentState(batch_dim=0)
    for _ in range(5):
        for batch in loader:
            state = counted(batch, carry.before(batch))
            carry.after(batch, state)
            assert state.flatten().tolist() == (batch.position.max(0).values + 1).tolist()


def test_batches_that_cannot_be_followed_are_refused():
    carry, batches = RecurrentState(batch_dim=0), iter(loader_of([3, 4, 3, 4], windows="packed"))
    run(carry, [next(batches)])
    with pytest.raises(ValueError, match=r"lane 0 starts source 2 at t = 1.*packed=True"):
        carry.before(next(batches))
    loader = StreamDataLoader(StreamDataset([2], ones, 1, time_steps=2), collate_fn=lambda windows: windows[0])
    with pytest.raises(TypeError, match="collate_fn"):
        RecurrentState().before(next(iter(loader)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_lane_that_goes_on_with_nan_is_named(bad):
    carry, batches = RecurrentState(batch_dim=0), list(loader_of([3, 9, 2]))
    run(carry, batches[:1])
    carry.after(batches[1], torch.tensor([[1.0], [bad]]))
    with pytest.raises(NonFiniteStateError) as caught:
        carry.before(batches[2])
    assert (caught.value.lane, caught.value.source_index, caught.value.position) == (1, 1, 4)
    assert isinstance(caught.value, FloatingPointError)
    assert not isinstance(caught.value, StreamError)  # `except StreamError` is about bad data
    carry.reset([caught.value.lane])
    assert carry.before(batches[2]).tolist() == [[0], [0]]  # a stream starts in lane 0
    first, second = loader_of([4, 4, 4], 3)
    carry = RecurrentState(torch.zeros(1, 1), batch_dim=0)
    carry.after(first, torch.full((3, 1), bad))
    with pytest.raises(NonFiniteStateError, match=r"^lane 0 .* NaN or infinity \(and 2 more lanes\), which"):
        carry.before(second)
    assert RecurrentState(torch.zeros(1, 1), batch_dim=0).to("meta").before(first).device.type == "meta"


def test_a_lane_with_nan_begins_anew_or_keeps_it_if_asked():
    batches, state = list(loader_of([9, 9])), torch.tensor([[1.0], [float("nan")]])
    carry = RecurrentState(torch.full((1, 1), 7.0), batch_dim=0, nonfinite="reset")
    carry.after(batches[0], state)
    with pytest.warns(RuntimeWarning, match="lane 1 .* position 2"):
        assert carry.before(batches[1]).tolist() == [[1], [7]]
    carry = RecurrentState(batch_dim=0, nonfinite="keep")
    carry.after(batches[0], state)
    assert carry.before(batches[1]).isnan().tolist() == [[False], [True]]


def test_nan_of_a_stream_that_ended_does_not_count_nor_large_numbers():
    carry, batches = RecurrentState(batch_dim=0), list(loader_of([2, 9, 2]))
    carry.after(batches[0], torch.tensor([[float("nan")], [1.0]]))
    assert carry.before(batches[1]).tolist() == [[0], [1]]
    carry.after(batches[1], torch.full((2, 1), 2.0**127))  # their sum is infinite
    assert carry.before(batches[2])[1].item() == 2.0**127


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float16, torch.float64])
@pytest.mark.parametrize("initial", [None, nn.Parameter(torch.zeros(1, 3))])
def test_the_dtype_is_that_of_what_the_model_returned(initial, dtype):
    carry = RecurrentState(initial, batch_dim=0)
    for batch in loader_of([5, 2, 4]):
        state = carry.before(batch)
        assert state is initial if state is None else state.dtype == (dtype if batch.batch_index else torch.float32)
        carry.after(batch, torch.ones(2, 3, dtype=dtype))


def test_no_number_on_the_device_is_looked_at():
    """Tensors on "meta" have no numbers: to ask for one is an error, as it would be a wait on an accelerator."""
    carry = RecurrentState(batch_dim=1, nonfinite="keep")
    lstm = nn.LSTM(1, 3, 2, device="meta")
    for batch in loader_of([5, 2, 4, 1]):
        for micro in batch.to("meta").split_lanes(1 + batch.batch_index % 2):
            carry.after(micro, lstm(micro.data, carry.before(micro))[1])
    with pytest.raises(StateError):
        carry.before(list(loader_of([5, 5]))[1].to("meta"))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"detach_every": 0}, ValueError, "detach_every"),
        ({"detach_every": 1.5}, TypeError, "detach_every"),
        ({"nonfinite": "ignore"}, ValueError, "'raise', 'reset', 'keep'"),
        ({"burn_in": -1}, ValueError, "burn_in"),
        ({"burn_in": "2"}, TypeError, "burn_in"),
        ({"burn_in_at": "end"}, ValueError, "'start', 'window'"),
        ({"batch_dim": "first"}, TypeError, "batch_dim"),
        ({"initial": 3}, TypeError, "initial is a int"),
        ({"initial": (torch.zeros(1, 3), nn.Parameter(torch.zeros(1, 3), False))}, ValueError, r"initial\[1\].*grad"),
        ({"initial": nn.Parameter(torch.zeros(1, 3)) * 2}, ValueError, "the Parameter itself"),
        ({"initial": torch.zeros(2, 8, 3), "batch_dim": 1}, ValueError, r"\(2, 8, 3\).*dimension 1"),
        ({"initial": torch.zeros(2, 8, 3)}, ValueError, "function of the batch"),
        ({"rank": 1}, ValueError, "both, or neither"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank is 2"),
    ],
)
def test_wrong_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        RecurrentState(**options)


@pytest.mark.slow
def test_a_compiled_model_needs_no_break_in_its_graph():
    torch.manual_seed(0)
    decay, cell = nn.Parameter(torch.rand(3)), nn.LSTMCell(3, 2)

    def model(data, state, is_first):
        scanned, h = linear_scan(inputs=data.expand(-1, -1, 3), decay=decay, state=state[0], is_first=is_first)
        output, cells = masked_rnn(cell, scanned, state=state[1], is_first=is_first)
        return output, (h, cells)

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    start = (torch.zeros(1, 3), (torch.zeros(1, 2), torch.zeros(1, 2)))
    carries = [RecurrentState(start, batch_dim=0, packed=True) for _ in range(2)]
    for batch in loader_of([9, 2, 4, 3], time_steps=3, windows="packed"):
        outputs = []
        for function, carry in zip((compiled, model), carries, strict=True):
            output, state = function(batch.data, carry.before(batch), batch.is_first)
            carry.after(batch, state)
            outputs.append(output)
        torch.testing.assert_close(*outputs)
