"""The seven promises as a state machine: any order of workers' moves, deaths, saved states, broken sources and epochs.

Workers are simulated (`simulated_pool`): one moves at a time, and which one is drawn, so a failure is shown as a short
list of moves that fails again. Two references say what must come: the serial model, and the same epoch read in one
process, of which every field is compared.

1. *Coherent*: `Words.note`: an item follows the one before it in its lane, or a stream's last.
2. *Exactly once*: `Words.note`: no item comes twice; `Words.end`: each has come.
3. *Just in time*: `Epochs`: lanes take what the serial model takes, which takes a source when it needs one.
4. *The same batches*: `Model.check`: every field but `worker_id`, for any workers and any order of their moves.
5. *No hidden batch*: `Words.note`: each batch has something new; `Model.check_end`: the epoch ends with the model's.
6. *Resumable*: `Model.resume`: from any state saved before, also of an earlier batch, with any number of workers.
7. *Never silently wrong*: `Model.check_error`: a broken source is an error at its own step, or, `Model.check_end`, is
   skipped and told; `Model.deliver_one`: a death that is one too many is an error.

With `deterministic=False` the order is free, so `Words` alone is the judge.
"""

import copy
import itertools
import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from cases import Case, Words, cases, cells, check_fields, key
from helpers import random_cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulated_pool import SimulatedLoader, pause

from stream_dataloader import StreamDataLoader, get_stream_info
from stream_dataloader.errors import ReadError, WorkerDeathError

pytestmark = [
    pytest.mark.filterwarnings("ignore:skipped the rest of a stream:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:the iteration that continued:RuntimeWarning"),
]

ENDLESS_STEPS = 16  # of an epoch without an end
MAX_RESTARTS = 2
WORKERS = st.sampled_from([0, 1, 2, 2, 3, 4])
MOVES = st.lists(st.integers(0, 3), max_size=12)


@dataclass
class Stream:
    """Items that tell source, position and a draw; broken ones raise where `broken` says, by source."""

    broken: dict

    def __call__(self, source):
        yield from self.items(source, 0)

    def items(self, source, start):
        index, length = source
        for position in range(start, self.broken.get(index, length)):
            pause()
            info = get_stream_info()
            assert info.source_index == index
            yield np.array([index, position, info.rng_at(position).integers(1 << 20)])
        pause()
        if index in self.broken:
            raise OSError("the disk is broken")


class SeekingStream(Stream):
    """The same, opened at any item."""

    def __call__(self, source, start=0):
        yield from self.items(source, start)


@dataclass
class Sample:
    """What one run of the machine reads."""

    case: Case
    broken: dict  # by source: the item at which it raises
    deterministic: bool
    seeks: bool

    def dataset(self, on_error):
        factory = (SeekingStream if self.seeks else Stream)(self.broken)
        # It does not declare `open_early`, because the machine does not lead the thread that opens early.
        return self.case.dataset(open_stream=factory, deterministic=self.deterministic, on_error=on_error)

    @property
    def readable(self):
        """The case with streams as long as they can be read."""
        lengths = [self.broken.get(index, length) for index, length in enumerate(self.case.lengths)]
        return Case(**{**vars(self.case), "lengths": lengths, "broken": tuple(self.broken)})

    @property
    def endless(self):
        return self.case.padding_mode == "cycle"


MODES = ("zeros", "data", "drop", "cycle")
FEW = cases(max_streams=10, max_length=6, max_lanes=4, modes=MODES)
#: So many sources a lane that requests ahead are not refused, and several are undecided at a time.
MANY = cases(20, 3, 3, MODES, min_streams=10, min_lanes=2, lookahead=1)


@st.composite
def samples(draw):
    case = draw(st.one_of(FEW, MANY))
    broken = {}
    for index in draw(st.lists(st.integers(0, len(case.lengths) - 1), max_size=2, unique=True)):
        broken[index] = draw(st.integers(0, case.lengths[index]))
    if case.padding_mode == "cycle":  # which has to find an item
        broken.pop(0, None)
    return Sample(case, broken, draw(st.booleans()), draw(st.booleans()))


class Epochs:
    """What the batches of each epoch must be, if their order is not free: all that can be compared of each."""

    def __init__(self, sample):
        self._sample, self._known = sample, {}

    def __getitem__(self, epoch):
        if epoch not in self._known:
            sample = self._sample
            loader = StreamDataLoader(sample.dataset("skip"))
            loader.set_epoch(epoch)
            most = ENDLESS_STEPS if sample.endless else None
            iterator = iter(loader)
            batches = list(itertools.islice(iterator, most))
            iterator.close()
            expected = list(itertools.islice(sample.readable.expected(loader.dataset, epoch), most))
            assert [cells(batch) for batch in batches] == expected
            self._known[epoch] = [key(batch) for batch in batches]
        return self._known[epoch]


@dataclass
class Place:
    """A place in an epoch: how many batches were delivered, what they held, and the sources told as skipped."""

    epoch: int
    step: int
    words: Words
    skipped: set = field(default_factory=set)


class Model(RuleBasedStateMachine):
    """A user of one loader after the other, who may do whatever users do, in any order."""

    @initialize(
        sample=samples(), workers=WORKERS, prefetch=st.integers(1, 3), on_error=st.sampled_from(["skip", "raise"])
    )
    def begin(self, sample, workers, prefetch, on_error):
        self.sample, self.prefetch, self.on_error = sample, prefetch, on_error
        self.epochs, self.saved = Epochs(sample), []
        self.place = self.coming = self.beginning(0)  # where the user stands, and where the next iteration begins
        self.loaded = None  # the place of a loaded state, as long as no iteration has taken it
        self.use(self.new_loader(workers))
        self.save()

    def beginning(self, epoch):
        return Place(epoch, 0, Words(self.sample.readable))

    def new_loader(self, workers):
        dataset = self.sample.dataset(self.on_error)
        workers = min(workers, self.sample.case.lanes)
        return SimulatedLoader(dataset, workers, prefetch=self.prefetch, max_restarts=MAX_RESTARTS)

    def use(self, loader):
        self.loader, self.iterator = loader, None
        self.failures = 0  # of the loader's, how many were looked at

    @rule(worker=st.integers(0, 3), times=st.integers(1, 6))
    def move(self, worker, times):
        for _ in range(times):
            self.loader.move(worker)

    @rule(worker=st.integers(0, 3), noticed_late=st.booleans())
    def kill(self, worker, noticed_late):
        self.loader.kill(worker, noticed_late=noticed_late)

    @rule(worker=st.integers(0, 3))
    def doom(self, worker):
        """Have a worker die between two parts of a step."""
        self.loader.doomed = worker

    @rule(orders=st.lists(MOVES, min_size=1, max_size=4))
    def deliver(self, orders):
        """The next batches, up to the epoch's end, or of the next epoch if there is no iteration."""
        for order in orders:
            self.deliver_one(order)
            self.save()
            if self.iterator is None:
                return

    @rule(order=MOVES)
    def finish(self, order):
        self.deliver_one(order)
        while self.iterator is not None or self.place is self.loaded:  # a state was loaded after an error
            self.deliver_one(())
        self.save()

    def deliver_one(self, order):
        loader = self.loader
        if self.sample.endless and (self.place if self.iterator else self.coming).step == ENDLESS_STEPS:
            self.set_epoch(self.place.epoch + 1)
            return
        if self.iterator is None:
            self.iterator, self.place, self.loaded = iter(loader), self.coming, None
            loader.deaths = 0
        loader.order = order
        try:
            batch = next(self.iterator, None)
        except ReadError as error:
            self.check_error(error)
            self.on_error = "skip"  # what the user does about it
            self.resume_from(loader.state_dict(), self.place, loader.num_workers)
            return
        except WorkerDeathError:
            assert loader.deaths == MAX_RESTARTS + 1
            self.resume_from(loader.state_dict(), self.place, loader.num_workers)
            return
        assert loader.deaths <= MAX_RESTARTS
        self.place.skipped |= {failure.source_index for failure in loader.failures[self.failures :]}
        self.failures = len(loader.failures)
        if batch is None:
            self.check_end()
            self.iterator, self.place = None, self.beginning(self.place.epoch + 1)
            self.coming = self.place
        else:
            self.check(batch)
            self.place.step += 1

    def check(self, batch):
        place = self.place
        assert (batch.epoch, batch.batch_index) == (place.epoch, place.step)
        check_fields(batch)
        place.words.note(batch)
        if self.sample.deterministic:
            expected = self.epochs[place.epoch]
            assert place.step < len(expected), "a batch behind the epoch's end"
            assert key(batch) == expected[place.step]

    def check_end(self):
        place, broken = self.place, set(self.sample.broken)
        assert not self.sample.endless
        place.words.end()
        if self.sample.deterministic:
            assert place.step == len(self.epochs[place.epoch]), "the epoch ended early"
        assert place.skipped <= broken
        if self.sample.case.padding_mode != "drop":  # which may leave sources out
            assert place.skipped == broken, "a source was skipped in silence"

    def check_error(self, error):
        """The error is that of the first broken item, and comes where the item would have come."""
        broken, place = self.sample.broken, self.place
        assert self.on_error == "raise"
        assert error.position == broken[error.source_index]
        if not self.sample.deterministic:
            return
        whole = Sample(self.sample.case, {index: item + 1 for index, item in broken.items()}, True, False).readable
        batches = list(itertools.islice(whole.expected(self.loader.dataset, place.epoch), place.step + 1))
        if len(batches) <= place.step:  # the lane that broke took no further source, so no lane idled for want of it
            assert self.sample.case.padding_mode == "drop"
            return
        batch = batches[place.step]
        broke = [(lane, cell[0]) for lane, window in enumerate(batch) for cell in window if is_in(cell, broken)]
        assert broke, "an error at a step without a broken item"
        first = broke[0]
        assert first == (error.lane, error.source_index)

    @precondition(lambda self: self.iterator is not None)
    @rule()
    def leave(self):
        """Leave the epoch; the next batch is of the next one."""
        self.iterator.close()
        self.save()
        self.iterator, self.coming = None, self.beginning(self.place.epoch + 1)

    @rule(epoch=st.integers(0, 2))
    def set_epoch(self, epoch):
        if self.iterator is not None:
            self.leave()
        self.loader.set_epoch(epoch)
        is_loaded = self.loaded is not None and self.loaded.epoch == epoch
        self.place = self.coming = self.loaded if is_loaded else self.beginning(epoch)
        self.save()

    def save(self):
        """As a checkpoint does: through a file."""
        self.saved.append((json.dumps(self.loader.state_dict()), copy.deepcopy(self.place)))

    @rule(age=st.integers(0, 5), workers=WORKERS)
    def resume(self, age, workers):
        state, place = self.saved[-1 - min(age, len(self.saved) - 1)]
        self.resume_from(json.loads(state), place, workers)

    def resume_from(self, state, place, workers):
        assert (state["epoch"], state["step"]) == (place.epoch, place.step)
        self.teardown()
        self.use(self.new_loader(workers))
        self.loader.load_state_dict(state)
        self.place = self.coming = self.loaded = copy.deepcopy(place)

    def teardown(self):
        if getattr(self, "iterator", None) is not None:
            self.iterator.close()


def is_in(cell, broken):
    """Whether a cell of the serial model holds an item that cannot be read."""
    return cell is not None and broken.get(cell[0]) == cell[1]


TestModel = Model.TestCase
TestModel.settings = settings(random_cases(300, 20), stateful_step_count=20)
