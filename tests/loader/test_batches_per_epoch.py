"""Epochs of n batches: together they are the endless run, wherever one stops, is left, saved or loaded."""

import itertools
import json
import multiprocessing
import os
import signal
import time
import traceback

import pytest
import torch
from cases import Case, cases, key, keys
from helpers import make_loader, random_cases, seldom, soon
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StateError, StreamDataLoader, StreamDataset
from stream_dataloader.errors import ReadError, WorkerError

CASE = Case([4, 0, 9, 2, 2, 7, 1, 3], 4, 3, "packed", "cycle", 1, True, 3)
SETUPS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


def endless(steps, case=CASE):
    return [key(batch) for batch in itertools.islice(StreamDataLoader(case.dataset()), steps)]


def loader_of(n=5, **options):
    return StreamDataLoader(CASE.dataset(), batches_per_epoch=n, **options)


def place(state):
    return state["epoch_place"]["number"], state["epoch_place"]["delivered"], state["step"]


def check_run(case, lengths, legs, setups):
    """Take batches leg after leg, after some of them with a new loader: all together are the endless run."""
    expected = endless(sum(taken for taken, *_ in legs), case)
    lengths, setups = itertools.cycle(lengths), itertools.cycle(setups)
    n, step, number, delivered = next(lengths), 0, 0, 0  # of the coming epoch
    loader, saved = StreamDataLoader(case.dataset(), batches_per_epoch=n, **next(setups)), (0, 0, 0)
    last_batches = []
    for taken, how, is_loaded in legs:
        batches = itertools.islice(loader, taken)  # Lightning sets the number between iter() and the first next()
        if how != "not at all":
            (loader if how == "of the loader" else loader.dataset).set_epoch(number)
        assert len(loader) == n
        count = min(taken, n - delivered)
        read = list(batches)
        assert list(map(key, read)) == expected[step : step + count]
        step += count
        if count:
            ended = delivered + count == n
            saved = (number + 1, 0, step) if ended else (number, delivered + count, step)
            number, delivered = number + 1, 0
            last_batches.append((read[-1], saved))
        state = json.loads(json.dumps(loader.state_dict()))
        assert place(state) == saved
        if is_loaded:
            n = next(lengths)
            loader = StreamDataLoader(case.dataset(seed=5), batches_per_epoch=n, **next(setups))
            loader.load_state_dict(state)
            number, delivered = saved[:2] if saved[1] < n else (saved[0] + 1, 0)
            saved = number, delivered, step
    for batch, saved in last_batches:
        assert place(batch.state_dict()) == saved, "it knows its own, whatever was read behind it"


ways_to_set = st.sampled_from(["of the loader", "of the dataset", "not at all"])
some_legs = st.lists(st.tuples(st.integers(0, 7), ways_to_set, st.booleans()), min_size=1, max_size=5)
some_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@random_cases(200)
@given(cases(modes=("cycle",)), some_lengths, some_legs)
@pytest.mark.filterwarnings("ignore:the iteration that continued")
def test_all_epochs_together_are_the_endless_run(case, lengths, legs):
    check_run(case, lengths, legs, [{}])


@random_cases(30, quick=3)
@given(cases(modes=("cycle",)), some_lengths, some_legs, st.lists(st.sampled_from(SETUPS), min_size=1))
@pytest.mark.filterwarnings("ignore:num_workers is", "ignore:the iteration that continued")
def test_so_they_are_for_any_number_of_workers(case, lengths, legs, setups):
    check_run(case, lengths, legs, setups)


def pids():
    return {child.pid for child in multiprocessing.active_children()}


def test_persistent_workers_are_kept_also_after_an_epoch_that_was_left():
    loader = loader_of(3, num_workers=2, persistent_workers=True)
    keys(loader)
    workers = pids()
    assert len(workers) == 2
    for _ in loader:
        break
    keys(loader)
    assert pids() == workers
    del loader
    assert soon(lambda: not pids())


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=str)
def test_streams_stay_open_between_epochs_where_no_worker_ends(options, tmp_path):
    def read(n):
        with (tmp_path / "opened").open("a") as file:
            file.write("x")
        yield from range(100)

    loader = make_loader([0, 1], read, 2, "cycle", time_steps=2, lookahead=0, batches_per_epoch=3, **options)
    for _ in range(4):
        assert len(list(loader)) == 3
        assert soon(lambda: not multiprocessing.active_children())
    opened = (tmp_path / "opened").stat().st_size
    assert opened == (8 if options else 2)


@pytest.mark.parametrize("options", seldom(SETUPS, *SETUPS[::2]), ids=str)
def test_parts_and_what_collate_fn_makes_are_cut_alike(options):
    workers = options.get("num_workers", 0)
    whole = itertools.islice(StreamDataLoader(CASE.dataset(), workers).parts(), 8 * max(1, workers))
    loader = loader_of(4, collate_fn=lambda windows: torch.stack(windows, 1), **options)
    found = [key(part, worker_id=True) for _ in range(2) for part in loader.parts()]
    assert found == [key(part, worker_id=True) for part in whole]
    assert loader.state_dict()["step"] == 8

    collated = [batch.tolist() for _ in range(2) for batch in loader]
    batches = itertools.islice(StreamDataLoader(CASE.dataset()), 8, 16)
    assert collated == [batch.data.tolist() for batch in batches]
    assert {part.batch_index for part in loader.parts()} == set(range(16, 20))


@pytest.mark.parametrize("options", seldom(SETUPS, *SETUPS[::2]), ids=str)
def test_without_determinism_each_pass_reads_every_item_once(options):
    lengths = [4, 3, 9, 2, 2, 7, 1, 3]
    dataset = StreamDataset(lengths, range, 3, "cycle", time_steps=3, deterministic=False)
    loader, read = StreamDataLoader(dataset, batches_per_epoch=4, **options), []
    for _ in range(6):
        for batch in loader:
            real = batch.mask
            read += zip(batch.source_index[real].tolist(), batch.position[real].tolist(), strict=True)
    times = [read.count((source, i)) for source, length in enumerate(lengths) for i in range(length)]
    passes = len(read) / sum(lengths)
    assert passes - 2 < min(times) <= passes <= max(times) < passes + 2  # some lanes are a pass ahead


# States


def test_behind_the_last_batch_the_state_is_the_next_epochs_beginning():
    loader = loader_of(3)
    batches = iter(loader)
    read = [next(batches) for _ in range(3)]
    before = loader.state_dict()
    assert next(batches, None) is None
    assert before == loader.state_dict() == read[-1].state_dict() == loader.state_dict(3)
    assert place(before) == (1, 0, 3)
    assert place(read[1].state_dict()) == place(loader.state_dict(2)) == (0, 2, 2)
    loader.set_epoch(0)
    keys(loader)
    assert read[-1].state_dict() == before, "a batch of another run still knows its own"


def test_a_run_may_be_cut_into_epochs_later_or_not_any_more():
    whole, cut = StreamDataLoader(CASE.dataset()), loader_of(4)
    list(itertools.islice(whole, 6))
    for number in (None, 0, 7):  # its epochs count from 0, or from where a trainer says
        cut.load_state_dict(whole.state_dict())
        if number is not None:
            cut.set_epoch(number)
        assert place(cut.state_dict()) == (number or 0, 0, 6)
        assert keys(cut) == endless(10)[6:]
        assert place(cut.state_dict()) == ((number or 0) + 1, 0, 10)
    whole.load_state_dict(cut.state_dict())
    assert keys(itertools.islice(whole, 6)) == endless(16)[10:]


def test_a_state_that_is_not_whole_is_refused():
    loader = loader_of(6)
    next(iter(loader))
    broken = loader.state_dict()
    for stretch in ({}, {"number": 1, "delivered": -1}, None):
        with pytest.raises(StateError, match=r"not whole|must be a whole number"):
            loader.load_state_dict(broken | {"epoch_place": stretch})


# Numbers


@pytest.mark.parametrize("options", SETUPS[::2], ids=str)
def test_number_0_begins_the_run_anew(options):
    loader = loader_of(3, **options)
    for _ in range(2):
        assert keys(loader) == endless(3)
        assert keys(loader) == endless(6)[3:]
        loader.set_epoch(7)
        loader.set_epoch(0)  # the last call counts
        assert place(loader.state_dict()) == (0, 0, 0)


@pytest.mark.parametrize("options", SETUPS[::2], ids=str)
def test_any_other_number_is_given_to_the_coming_epoch_with_a_warning(options):
    loader = loader_of(3, **options)
    keys(loader)
    loader.set_epoch(9)
    assert place(loader.state_dict()) == (9, 0, 3)
    with pytest.warns(RuntimeWarning, match=r"set_epoch\(9\) was called, and epoch 1 comes next"):
        assert keys(loader) == endless(6)[3:]
    assert keys(loader) == endless(9)[6:]
    assert place(loader.state_dict()) == (11, 0, 9)


# What goes wrong


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match='batches_per_epoch is 3, which needs padding_mode="cycle"'):
        StreamDataLoader(CASE.dataset(padding_mode="zeros"), batches_per_epoch=3)
    for wrong, error in [(0, ValueError), (2.5, TypeError), (True, TypeError), ("3", TypeError)]:
        with pytest.raises(error, match="batches_per_epoch"):
            loader_of(wrong)
    loader = loader_of(3)
    with pytest.raises(AttributeError, match="batches_per_epoch"):  # len would tell it, and epochs have 3 batches
        loader.batches_per_epoch = 5
    assert len(loader) == len(keys(loader)) == 3


def error_of(loader):
    """What the next batch's error says; its frames, in a circle, would keep the workers."""
    try:
        return next(iter(loader)).batch_index
    except ReadError as error:
        traceback.clear_frames(error.__traceback__)
        return str(error)


@pytest.mark.parametrize("options", seldom(SETUPS, *SETUPS[::2]), ids=str)
def test_an_error_is_met_again_and_passes_over_nothing(options, tmp_path):
    def read(n):
        for i in range(100):
            if (n, i) == (1, 5) and not (tmp_path / "mended").exists():
                raise OSError("broken")
            yield i

    loader = make_loader([0, 1], read, 2, "cycle", time_steps=2, lookahead=0, batches_per_epoch=2, **options)
    assert [batch.batch_index for batch in loader] == [0, 1]
    for _ in range(2):
        loader.set_epoch(1)  # none of its batches was delivered
        assert "broken" in error_of(loader)
    (tmp_path / "mended").touch()
    assert [batch.data[:, 1].tolist() for batch in loader] == [[4, 5], [6, 7]]


def test_an_error_at_the_first_batch_behind_a_loaded_state_uses_nothing_up(tmp_path):
    """The rest of the epoch comes again, so there is nothing to warn of."""

    def read(n):
        for i in range(100):
            if i == 2 and not (tmp_path / "mended").exists():
                raise OSError("broken")
            yield i

    loader = make_loader([0, 1], read, 2, "cycle", time_steps=2, lookahead=0, batches_per_epoch=3)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert "broken" in error_of(loader)
    (tmp_path / "mended").touch()
    assert [batch.batch_index for batch in loader] == [1, 2]


def test_workers_of_which_one_died_between_two_epochs_are_replaced():
    loader = loader_of(num_workers=2, persistent_workers=True)
    assert keys(loader) == endless(5)
    worker = multiprocessing.active_children()[0]
    worker.kill()
    worker.join()
    with pytest.warns(UserWarning, match="between two epochs; all workers are started anew"):
        assert keys(loader) == endless(10)[5:]
    assert loader.stats().restarts == 0


def test_deaths_in_an_epoch_count_against_their_source_in_the_next_one(tmp_path):
    """The first comes in epoch 0, where the other worker waits for it, the others behind the first batch of epoch 1."""
    deaths, begun = tmp_path / "deaths", tmp_path / "begun"

    def read(n):
        was_before = not deaths.exists()
        for i in range(100):
            time.sleep(0.003)  # so that a message has one step, and those before step 7 do not wait with it
            if (n, i) == (0, 7):
                while deaths.exists() and not begun.exists():
                    time.sleep(0.005)
                with deaths.open("a") as file:
                    file.write("x")
                os.kill(os.getpid(), signal.SIGKILL)
            while (n, i) == (1, 4) and was_before:
                time.sleep(1)  # until it is ended
            yield i

    loader = make_loader(
        [0, 1],
        read,
        2,
        "cycle",
        time_steps=1,
        lookahead=0,
        on_error="skip",
        batches_per_epoch=5,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=8,
        max_restarts=3,
    )
    assert len(list(loader)) == 5
    assert deaths.read_text() == "x"
    batches = iter(loader)
    next(batches)
    begun.touch()
    with pytest.warns(RuntimeWarning, match="skipped the rest of a stream: .*source 0"):
        assert [batch.batch_index for batch in batches] == [6, 7, 8, 9]
    assert deaths.read_text() == "xxx", "the third death at one place proves that the source is its cause"


@pytest.mark.parametrize("persistent", [False, True])
def test_restarts_are_counted_epoch_by_epoch(persistent, tmp_path):
    def read(n):
        for i in range(5000):  # far apart, as workers read ahead
            if n == 1 and i in (3, 2001) and not (tmp_path / str(i)).exists():
                while i == 2001 and not (tmp_path / "fourth epoch").exists():
                    time.sleep(0.01)  # one that dies sooner may be found dead between two epochs, which is no restart
                (tmp_path / str(i)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield i

    def loader(n):
        dataset = StreamDataset([0, 1], read, 2, "cycle", time_steps=2, lookahead=0)
        return StreamDataLoader(dataset, 2, batches_per_epoch=n, max_restarts=1, persistent_workers=persistent)

    def steps(loader, epochs):
        for _ in range(epochs):
            for batch in loader:
                if batch.batch_index == 900:
                    (tmp_path / "fourth epoch").touch()
                yield batch.batch_index

    assert list(steps(loader(300), 4)) == list(range(1200))
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        list(steps(loader(1200), 1))


@pytest.mark.parametrize("options", seldom(SETUPS, *SETUPS[::2]), ids=str)
def test_what_was_copied_ahead_to_a_device_is_the_next_epochs(options, cuda):
    loader = loader_of(3, device="cuda", **options)
    expected = endless(8)
    assert keys(loader) == expected[:3]
    assert place(loader.state_dict()) == (1, 0, 3)
    assert keys(itertools.islice(loader, 2)) == expected[3:5]
    assert place(loader.state_dict()) == (1, 2, 5)
    assert keys(loader) == expected[5:8]
    assert {part.batch_index for _ in range(2) for part in loader.parts()} == set(range(8, 14))


@pytest.mark.parametrize("batches", [3, 5])
def test_a_state_of_n_delivered_batches_begins_the_next_epoch_of_n(batches):
    expected, longer = endless(12), loader_of(7)
    list(itertools.islice(longer, batches))
    for n in (batches - 1, batches, batches + 1):
        loader = loader_of(n)
        loader.load_state_dict(longer.state_dict())
        begun, left = (0, 1) if n > batches else (1, n)
        assert (loader.epoch, keys(loader)) == (begun, expected[batches : batches + left]), n
        loader.set_epoch(0)
        assert keys(loader) == expected[:n], "set_epoch(0) begins anew"


def test_after_a_state_without_epochs_set_epoch_says_how_the_run_goes_on():
    expected, run = endless(12), StreamDataLoader(CASE.dataset())
    list(itertools.islice(run, 4))
    loader = loader_of(3)
    loader.load_state_dict(run.state_dict())
    loader.set_epoch(0)
    assert keys(loader) == expected[4:7]
    assert loader.epoch == 1
    loader.set_epoch(0)
    assert keys(loader) == expected[:3], "an epoch 0 was read: it begins anew"
