"""Accelerate, the real package: ends of epochs, devices, skipping, and checkpoints in mid-epoch."""

import functools
import importlib.util
import itertools

import numpy as np
import pytest
import torch
from carried import Carriers, check_carried
from cases import key, keys
from helpers import run_trainer
from worker_streams import acting, raising

from stream_dataloader import StateError, StreamDataLoader, StreamDataset, get_stream_info, side_by_side
from stream_dataloader.errors import ReadError

pytestmark = [
    pytest.mark.slow,  # to import accelerate takes seconds
    pytest.mark.filterwarnings("ignore"),  # warnings are theirs
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate"),
]

LENGTHS = [9, 14, 3, 12, 8, 7, 11, 5]
ALL = [(i, j) for i, length in enumerate([*LENGTHS, 2, 6]) for j in range(length)]


def open_stream(length):
    source = get_stream_info().source_index
    return iter([np.full(3, 100 * source + i, np.float32) for i in range(length)])


def loader(workers=0, *, known=False, collate_fn=None, beside=False, **options):
    if known:
        options["lengths"] = LENGTHS
    dataset = StreamDataset(LENGTHS, open_stream, 2, **{"time_steps": 3, "shuffle": True, "seed": 0} | options)
    if beside:
        run = StreamDataset(LENGTHS[:4], open_stream, 1, "cycle", time_steps=3, shuffle=True, seed=1)
        return side_by_side([(dataset, 2), (run, 1)], workers, collate_fn=collate_fn)
    return StreamDataLoader(dataset, workers, collate_fn)


def windows(collated):
    """A collate_fn: the batch is no `StreamBatch`, and knows no state."""
    return torch.stack(collated, 1)


@pytest.fixture
def accelerator_of():
    """Makes an accelerator as a fresh process has it: its states are shared by all of a process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def build(**options):
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, **options)

    yield build
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def prepare(*given, **options):
    from stream_dataloader.integrations import accelerate

    return accelerate.prepare(*given, **options)


def prepared(accelerator, *args, **options):
    return prepare(accelerator, loader(*args, **options))


def stretches(collate_fn=None, length=5):
    return StreamDataLoader(loader(padding_mode="cycle").dataset, 0, collate_fn, batches_per_epoch=length)


def optimizer_steps(accelerator, batches, data_of):
    """How many batches there are, and how many optimizer steps accelerate does with them."""
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    done = []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(data_of(batch)).mean())
            optimizer.step()
            optimizer.zero_grad()
        done.append(accelerator.sync_gradients)
    return len(done), sum(done)


@pytest.mark.parametrize("known", [False, True])
def test_the_last_gradients_of_an_epoch_are_applied(accelerator_of, known):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    ours = prepared(accelerator, known=known)
    for _ in range(2):
        batches, steps = optimizer_steps(accelerator, ours, lambda batch: batch.data)
        assert batches % 4, "not the case that is meant"
        torchs = accelerator.prepare(torch.utils.data.DataLoader(torch.zeros(batches, 3)))
        assert (batches, steps) == optimizer_steps(accelerator, torchs, lambda batch: batch)


def test_it_yields_what_the_loader_does_and_knows_the_end(accelerator_of):
    bare, ours = loader(known=True, mark_ends=False), prepared(accelerator_of(), 2)
    state = ours.gradient_state
    for epoch in range(2):
        seen = [(key(batch), state.end_of_dataloader, state.remainder, ours.epoch, ours.step) for batch in ours]
        count = len(bare)
        assert [entry[0] for entry in seen] == keys(bare)
        assert [entry[1:] for entry in seen] == [(i == count, 0, epoch, i) for i in range(1, count + 1)]
        assert not state.in_dataloader
    assert (ours.epoch, ours.step, bool(ours), ours.batch_size) == (2, 0, True, 2)
    with pytest.raises(TypeError, match="lengths="):
        len(ours)


def test_a_loop_that_is_left_leaves_nothing_behind(accelerator_of):
    ours = prepared(accelerator_of())
    for batch in ours:
        if batch.batch_index == 2:
            break
    assert not ours.gradient_state.in_dataloader
    assert (ours.epoch, ours.step) == (0, 3)
    assert {batch.epoch for batch in ours} == {1}
    ours.set_epoch(7)
    assert ours.epoch == 7
    assert {batch.epoch for batch in ours} == {7}


def test_an_evaluation_within_the_loop_has_an_end_of_its_own(accelerator_of):
    accelerator = accelerator_of()
    training, evaluation = prepared(accelerator), prepared(accelerator, padding_mode="data")
    state, ends = training.gradient_state, []
    for batch in training:
        if batch.batch_index == 1:
            inner = [state.end_of_dataloader for _ in evaluation]
            assert inner == [False] * (len(inner) - 1) + [True]
        ends.append(state.end_of_dataloader)
    assert ends == [False] * (len(ends) - 1) + [True]


def test_an_error_is_raised_after_the_batch_before_it(accelerator_of):
    torn = acting({(1, 4): raising(OSError)}, 20)
    ours = prepare(accelerator_of(), StreamDataLoader(StreamDataset([0, 1], torn, 2, time_steps=2)))
    batches = iter(ours)
    assert [next(batches).batch_index, next(batches).batch_index] == [0, 1]
    assert not ours.end_of_dataloader
    with pytest.raises(ReadError):
        next(batches)
    assert ours.state_dict()["step"] == 2


KINDS = {
    "unknown": loader,
    "known": functools.partial(loader, known=True),
    "beside": functools.partial(loader, beside=True),
    "known, beside": functools.partial(loader, known=True, beside=True),
    "stretches": stretches,
}


@pytest.mark.parametrize("collate_fn", [None, windows])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_on_at_the_next_batch(accelerator_of, tmp_path, kind, collate_fn):
    def told(batch):
        return batch.tolist() if collate_fn else key(batch)

    def run(stop=None, folder=None, *, script_counts=False):
        """The batches of three epochs, of those that are left, or of those before a checkpoint was saved."""
        accelerator = accelerator_of(gradient_accumulation_steps=2)
        ours, first, seen = prepare(accelerator, KINDS[kind](collate_fn=collate_fn)), 0, []
        if folder is not None:
            accelerator.load_state(str(folder))
            first = int((folder / "epoch").read_text()) if script_counts else ours.epoch
        for epoch in range(first, 3):
            if kind == "stretches":
                ours.set_epoch(epoch)
            for batch in ours:
                assert kind != "stretches" or (ours.epoch, ours.end_of_dataloader) == (epoch, ours.step == 5)
                seen.append(told(batch))
                if len(seen) == stop:
                    accelerator.save_state(str(tmp_path / f"{stop}"))
                    (tmp_path / f"{stop}" / "epoch").write_text(str(epoch))
                    return seen
        return seen

    plain = KINDS[kind](collate_fn=collate_fn)
    epochs = [[told(batch) for batch in plain] for _ in range(3)]
    whole, one = list(itertools.chain(*epochs)), len(epochs[0])
    assert run() == whole
    for stop in (1, one - 1, one, one + 1, 2 * one):
        head = run(stop)
        for script_counts in (False, True):
            assert head + run(folder=tmp_path / f"{stop}", script_counts=script_counts) == whole, stop


def test_behind_an_epochs_last_batch_another_epoch_may_be_set(accelerator_of, tmp_path):
    accelerator, plain = accelerator_of(), loader(known=True)
    for _ in (ours := prepare(accelerator, loader(known=True))):
        if ours.end_of_dataloader:
            accelerator.save_state(str(tmp_path))
    accelerator = accelerator_of()
    ours = prepare(accelerator, loader(known=True))
    accelerator.load_state(str(tmp_path))
    assert ours.epoch == 0
    for one in (ours, plain):
        one.set_epoch(2)
    assert (ours.epoch, list(map(key, ours))) == (2, list(map(key, plain)))


def test_several_loaders_have_their_own_places_in_epochs_or_between_two(accelerator_of, tmp_path):
    def build(workers):
        accelerator = accelerator_of()
        return accelerator, *(prepared(accelerator, workers, seed=seed) for seed in range(3))

    accelerator, *first = build(0)
    for ours, used in zip(first, (5, 3, None), strict=True):
        list(itertools.islice(ours, used))
    accelerator.save_state(str(tmp_path))
    accelerator, one, other, between = build(2)
    accelerator.load_state(str(tmp_path))
    assert keys(one) == keys(loader())[5:]
    assert keys(other) == keys(loader(seed=1))[3:]
    assert between.epoch == 1
    between.set_epoch(1)  # as scripts do at an epoch's beginning
    assert keys(between) == keys(first[2])


def test_the_first_batches_are_skipped_once(accelerator_of, tmp_path):
    import accelerate

    whole = keys(loader())
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    ours = prepared(accelerator)
    for skipped in (0, 3, len(whole) - 1, len(whole), len(whole) + 5):
        ours.set_epoch(0)
        rest = accelerate.skip_first_batches(ours, skipped)
        seen = [(key(batch), accelerator.gradient_state.end_of_dataloader) for batch in rest]
        assert [batch for batch, _ in seen] == whole[skipped:]
        assert [end for _, end in seen] == [i == len(seen) - 1 for i in range(len(seen))]
    ours.set_epoch(0)
    rest = iter(accelerator.skip_first_batches(ours, 4))
    assert [key(next(rest)), key(next(rest))] == whole[4:6]
    accelerator.save_state(str(tmp_path))
    for skipped in (0, 6, 8):  # many scripts load a state and skip what it was saved after
        accelerator = accelerator_of()
        ours = prepared(accelerator)
        accelerator.load_state(str(tmp_path))
        generator = torch.get_rng_state()
        assert keys(accelerator.skip_first_batches(ours, skipped)) == whole[max(6, skipped) :]
        assert torch.equal(torch.get_rng_state(), generator)


def test_batches_come_on_the_accelerators_device(accelerator_of, monkeypatch):
    def device_of(given, **options):
        return next(iter(prepare(accelerator, given, **options))).data.device.type

    accelerator = accelerator_of()
    monkeypatch.setattr(accelerator.state, "device", torch.device("meta"))
    assert device_of(loader()) == "meta"
    assert device_of(loader().to("cpu")) == device_of(loader(), device_placement=False) == "cpu"
    monkeypatch.setattr(accelerator, "device_placement", False)
    assert device_of(loader()) == "cpu"


def test_what_cannot_be_prepared_is_refused(accelerator_of, tmp_path, monkeypatch):
    from accelerate.utils import DataLoaderConfiguration

    accelerator = accelerator_of()
    accelerator.register_for_checkpointing(loader())
    accelerator.save_state(str(tmp_path))
    accelerator = accelerator_of()
    ours = prepared(accelerator)
    assert prepare(accelerator, ours) is accelerator.prepare(ours) is ours
    assert len(accelerator._custom_objects) == 1
    with pytest.raises(StateError):  # of something else
        accelerator.load_state(str(tmp_path))
    for wrong in (torch.utils.data.DataLoader(loader().dataset, batch_size=None), loader().dataset, [1, 2]):
        with pytest.raises(TypeError, match="StreamDataLoader"):
            prepare(accelerator, wrong)
    for name in ("split_batches", "dispatch_batches"):
        accelerator = accelerator_of(dataloader_config=DataLoaderConfiguration(**{name: True}))
        prepare(accelerator, loader())  # one process: nothing to share
        monkeypatch.setattr(type(accelerator), "num_processes", 2)
        with pytest.raises(ValueError, match=f"{name}=True"):
            prepare(accelerator, loader())
        monkeypatch.undo()


def test_torchs_own_loader_does_in_one_process(accelerator_of):
    from accelerate.utils import DataLoaderConfiguration

    accelerator = accelerator_of(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    plain = torch.utils.data.DataLoader(loader().dataset, batch_size=None)
    assert keys(accelerator.prepare(plain)) == keys(loader())


def items_of(ranks):
    """The items that all ranks together read in epoch 0 for the first time."""
    tables = [table for seen in ranks for epoch, _, *table in seen if epoch == 0]
    rows = [row for table in tables for row in zip(*table, strict=True)]
    return sorted((s, p) for row in rows for s, p, m in zip(*row, strict=True) if m)


def test_a_loader_that_accelerate_prepares_itself_shards_nothing_again(tmp_path):
    whole, head, tail = (
        [seen for seen, *_ in run_prepared(tmp_path, "state.pt", stop, "itself")] for stop in (10**6, 4, 0)
    )
    assert len(whole[0]) == len(whole[1]) > 5
    assert items_of(whole) == ALL
    assert [before + after for before, after in zip(head, tail, strict=True)] == whole


def run_prepared(folder, name, stop, how, ranks=2):
    """Of each rank: batches, optimizer steps, parameters, states, and whether one of rank 0 alone was refused."""
    return run_trainer("accelerate_prepared.py", folder, folder / name, stop, how, ranks=ranks)


def test_two_processes_go_on_from_one_checkpoint(tmp_path):
    whole = run_prepared(tmp_path, "none", 10**6, "model")
    batches = [[entry[1] for entry in seen if entry[0] == 0] for seen, *_ in whole]
    assert batches[0] == batches[1]
    assert len(batches[0]) % 3, "not the case that is meant"
    assert whole[0][1:3] == whole[1][1:3]
    assert items_of(seen for seen, *_ in whole) == ALL
    heads, tails = (run_prepared(tmp_path, "state", stop, "model") for stop in (3, 0))
    for head, tail, expected in zip(heads, tails, whole, strict=True):
        for one in (0, 1, 3):
            assert head[one] + tail[one] == expected[one]
        assert tail[2] == expected[2]
        assert head[4]


def test_one_process_goes_on_where_two_stopped(tmp_path):
    one, other = run_prepared(tmp_path, "state", 3, "no model")
    (whole,), (tail,) = (
        run_prepared(tmp_path, name, stop, "no model", 1) for name, stop in (("none", 99), ("state", 0))
    )
    assert [entry[:2] for entry in one[0]] == [entry[:2] for entry in whole[0][:3]]
    assert tail[0] == whole[0][3:]
    assert [mine + others for mine, others in zip(one[3], other[3], strict=True)] == whole[3][:3]
    assert tail[3] == whole[3][3:]


@pytest.mark.parametrize("length", [1, 4])
def test_a_loop_over_n_batches_that_is_left_loses_none(accelerator_of, length):
    whole = keys(itertools.islice(loader(padding_mode="cycle"), 20))
    ours, seen = prepare(accelerator_of(), stretches(length=length)), []
    for stop in (2, 1, 4, 3):
        for batch in ours:
            seen.append(key(batch))
            if ours.step == stop:
                break
    assert seen == whole[: 10 if length == 4 else 4]
    rest = accelerator_of().skip_first_batches(ours, length - 1)
    assert keys(rest) == whole[len(seen) + length - 1 :][:1]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (4, 4)])
def test_what_is_carried_goes_to_another_number_of_lanes(accelerator_of, tmp_path, groups, before, after):
    lengths = [9 + i % 7 for i in range(24)]

    def build(lanes, **options):
        accelerator, carriers = accelerator_of(), Carriers()
        dataset = StreamDataset(lengths, open_stream, lanes, time_steps=3, shuffle=True, seed=0)
        ours = prepare(accelerator, StreamDataLoader(dataset, virtual_ranks=groups), carry=carriers.all, **options)
        return accelerator, carriers, ours

    accelerator, carriers, ours = build(before)
    read = []
    for batch in itertools.islice(ours, 4):
        read += check_carried(batch, carriers)
    accelerator.save_state(str(tmp_path / "saved"))
    if before != after:
        accelerator, *_ = build(after)
        with pytest.raises(StateError, match="batch_size"):
            accelerator.load_state(str(tmp_path / "saved"))
    accelerator, carriers, ours = build(after, changes=["batch_size"])
    accelerator.load_state(str(tmp_path / "saved"))
    for number, batch in enumerate(ours):
        assert number or 0 < (~batch.reset).sum() <= min(before, after)
        read += check_carried(batch, carriers)
    assert sorted(read) == [(i, j) for i, length in enumerate(lengths) for j in range(length)]
