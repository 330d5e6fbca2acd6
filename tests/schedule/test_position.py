"""Where a loader stands, from one epoch to the next, against a model that writes down what each batch belongs to."""

from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader._schedule.position import EpochPlace, EpochsOfRun, Position
from stream_dataloader._schedule.snapshot import Snapshot


class Reader:
    """Reads a run, or epochs of five steps, from where a position says; `place` is all there is to know of it."""

    def __init__(self, position):
        coming = position.coming()
        self.run, place, self.epoch = coming
        self.step = 0 if place is None else place.step
        position.begin(self.step, self.reached)

    def reached(self):
        return Snapshot(self.step, (), (), ())


@st.composite
def use(draw):
    """What is done between epochs: batches read of each, and a number that may be set before it."""
    return draw(st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 5)), max_size=8))


@given(st.integers(1, 4), use())
def test_a_run_moves_only_by_what_is_read_and_by_zero(length, steps):
    position = Position(length)
    step, number = 0, 0  # of the run, and of the epoch that comes by itself
    begun = False
    for count, wanted in steps:
        if wanted is not None:
            position.set_epoch(wanted)
            anew = wanted == 0 != number
            assert (position.renaming("loader") is None) == (wanted == number or anew)
            if anew:
                step, begun = 0, False
            number = wanted
        assert position.continues is begun
        reader = Reader(position)
        assert (reader.step, reader.epoch) == (step, EpochPlace(number, 0))
        assert position.left == length
        read = min(count, length)
        reader.step += read
        if read:
            assert position.epochs.at(reader.step) == EpochPlace(*divmod(number * length + read, length))
        step, begun = step + read, True
        number += read > 0  # an epoch of which nothing came begins again
    assert position.at_rest().coming() == position.coming()


@given(use())
def test_epochs_of_their_own_follow_each_other_and_a_set_number_is_used_once(steps):
    position, number = Position(), 0
    for count, wanted in steps:
        if wanted is not None:
            position.set_epoch(wanted)
            assert position.was_left
            number = wanted
        reader = Reader(position)
        assert (reader.run, reader.step, reader.epoch) == (number, 0, EpochPlace(number, 0))
        reader.step += count
        assert not position.was_left
        assert not position.continues
        number += 1


@given(st.integers(1, 4), st.integers(0, 6), st.none() | st.tuples(st.integers(0, 3), st.integers(0, 6)))
def test_a_loaded_place_is_used_once_unless_another_epoch_is_set(length, step, saved):
    place = Snapshot(step, (), (), ())
    position = Position(length)
    position.load(7, place, None if saved is None else EpochPlace(*saved))
    number, delivered = saved or (0, 0)
    at = EpochPlace(number + 1, 0) if delivered >= length else EpochPlace(number, delivered)
    assert position.coming() == (7, place, at)
    if saved is None:  # of a run that was not read in epochs: any number will do
        position.set_epoch(3)
        assert position.renaming("loader") is None
        at = EpochPlace(3, 0)
    reader = Reader(position)
    assert (reader.run, reader.step, reader.epoch) == (7, step, at)
    assert position.left == length - at.delivered

    position = Position()
    position.load(7, place, None)
    position.set_epoch(2)
    assert position.coming()[:2] == (2, None)
    position.set_epoch(7)
    assert position.coming()[:2] == (7, place)
    Reader(position)
    assert position.coming()[:2] == (8, None)


@given(st.integers(1, 5), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_step_belongs_to_the_epoch_that_the_model_wrote_down(length, counts):
    epochs, number, step, expected = None, 0, 0, []
    for count in counts:  # an epoch that is read on as often as it takes, and left somewhere
        if epochs is None:
            epochs = EpochsOfRun(length, step, EpochPlace(number, 0))
        else:
            epochs.begin(step, EpochPlace(number, 0))
        places = [EpochPlace(number + i // length, i % length) for i in range(count)]
        expected += places
        step += count
        number = places[-1].number + 1 if places else number
    for i, place in enumerate(expected):
        after = epochs.at(i + 1)  # behind the batch: within its epoch, or at the beginning of the next
        whole = place.delivered + 1 == length
        assert after == (EpochPlace(place.number + 1, 0) if whole else EpochPlace(place.number, place.delivered + 1))


def test_epochs_that_are_begun_again_without_a_batch_leave_the_last_number():
    epochs = EpochsOfRun(1, 0, EpochPlace(2, 0))
    epochs.begin(0, EpochPlace(1, 0))
    epochs.begin(0, EpochPlace(2, 0))
    assert epochs.at(1) == EpochPlace(3, 0)
