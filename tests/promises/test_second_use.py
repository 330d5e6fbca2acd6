"""One loader used again and again, held against the serial model: any order of iterators, states, epochs and errors.

`test_model` makes a new loader for each state. Here one object is kept: iterators are begun while others are read,
states are loaded into the loader that gave them, and a stream that broke is opened again. A ledger says that streams of
an iteration are closed before the next one opens any.
"""

import itertools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import cases, cells
from helpers import declared, random_cases, soon
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ledger import Counted, Ledger

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import IteratorError, ReadError

pytestmark = [
    pytest.mark.filterwarnings("ignore:the iteration that continued:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:num_workers is:UserWarning"),
]

MOST_STEPS = 30  # of an epoch without an end
WAYS = [{}, {}, {}, {"num_workers": 2, "worker_method": "thread"}]
WHICH = st.integers(0, 3)


class SecondUse(RuleBasedStateMachine):
    """One loader, and what it must yield.

    Attributes:
        coming: Epoch and step at which the next iteration begins.
        loaded: Those of the state that was loaded, until an iteration begins.
        iterators: Those that are held, with `place`, that of the batch that comes next, None before the first `next`;
            and with what it raises from now on, if it does.
    """

    @initialize(
        case=cases(max_streams=10, max_length=6, max_lanes=4, modes=("zeros", "data", "drop", "cycle")),
        way=st.sampled_from(WAYS),
        fault=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 5)),
        retries=st.integers(0, 1),
        early=st.booleans(),
    )
    def begin(self, case, way, fault, retries, early):
        self.folder = tempfile.TemporaryDirectory()
        self.ledger = Ledger(Path(self.folder.name) / "ledger")
        case.mark_ends = False
        self.reads_ahead, self.fault = bool(way), None
        if fault and not self.reads_ahead and fault[0] < len(case.lengths) and fault[1] < case.lengths[fault[0]]:
            self.fault = fault  # so that its batch is known
        broken = {self.fault[0]: (self.fault[1], 1)} if self.fault else {}
        self.case, self.retries = case, retries
        dataset = case.dataset(open_stream=declared(Counted(self.ledger, broken), early=early), retries=retries)
        self.loader = StreamDataLoader(dataset, **way | ({"num_workers": min(2, case.lanes)} if way else {}))
        self.iterators, self.coming, self.loaded, self.known = [], (0, 0), None, {}
        self.saved = [(json.dumps(self.loader.state_dict()), self.coming)]

    def expected(self, epoch):
        if epoch not in self.known:
            batches = self.case.expected(self.loader.dataset, epoch)
            self.known[epoch] = list(
                itertools.islice(batches, MOST_STEPS if self.case.padding_mode == "cycle" else None)
            )
        return self.known[epoch]

    @rule()
    def iterate(self):
        """Have one more iterator, which claims nothing yet; of four, the oldest is let go."""
        self.iterators.append(SimpleNamespace(batches=iter(self.loader), place=None, over=None))
        del self.iterators[:-4]

    @precondition(lambda self: self.iterators)
    @rule(which=WHICH, times=st.integers(1, 4))
    def read(self, which, times):
        one = self.iterators[which % len(self.iterators)]
        for _ in range(times):
            self.read_one(one)

    def read_one(self, one):
        if one.over is not None:
            with pytest.raises(one.over):
                next(one.batches)
            return
        before = len(self.ledger.of()) if one.place is None and not self.reads_ahead else None
        if one.place is None:
            self.claim(one)
        epoch, step = one.place
        if self.case.padding_mode == "cycle" and step == MOST_STEPS:
            return
        expected = self.expected(epoch)[step] if step < len(self.expected(epoch)) else None
        breaks = self.breaks_in(expected)
        if breaks and not self.retries:
            with pytest.raises(ReadError) as caught:
                next(one.batches)
            assert (caught.value.source_index, caught.value.position) == self.fault
            one.over = IteratorError  # not the end, so a loop that goes on must not take it for that
        else:
            batch = next(one.batches, None)
            found = None if batch is None else cells(batch)
            assert found == expected, f"epoch {epoch}, step {step}: {found}, and the model has {expected}"
            if batch is None:
                one.over = StopIteration
                return
            assert (batch.epoch, batch.batch_index) == one.place
            one.place = epoch, step + 1
        if breaks:
            self.fault = None
        self.save(one.place)
        if before is not None:
            self.check_released(before)

    def claim(self, one):
        """Begin an iteration: it ends those that were made before it."""
        for number, other in enumerate(self.iterators):
            if other.place is not None or number < self.iterators.index(one):
                other.over = other.over or IteratorError
        one.place, self.loaded = self.coming, None
        self.coming = one.place[0] + 1, 0

    def breaks_in(self, batch):
        cells = itertools.chain(*batch) if batch else ()
        return self.fault is not None and any(cell is not None and cell[:2] == self.fault for cell in cells)

    def check_released(self, before):
        """Streams of the iteration before were closed when the first of this one was opened."""
        events = self.ledger.of()
        first = next((n for n, event in enumerate(events[before:], before) if event.what == "open"), len(events))
        opened = {event.name for event in events[:before] if event.what == "open"}
        left = opened - {event.name for event in events[:first] if event.what == "close"}
        assert not left, f"{len(left)} streams were open when the next iteration opened its first"

    def save(self, place):
        state = self.loader.state_dict()
        assert (state["epoch"], state["step"]) == place
        self.saved.append((json.dumps(state), place))

    @rule(age=st.integers(0, 4), asks=st.booleans())
    def load(self, age, asks):
        state, place = self.saved[-1 - min(age, len(self.saved) - 1)]
        self.loader.load_state_dict(json.loads(state))
        self.coming = self.loaded = place
        for one in self.iterators:
            if one.place is not None:
                one.over = one.over or IteratorError
                if asks:
                    self.read_one(one)

    @rule(epoch=st.integers(0, 2))
    def set_epoch(self, epoch):
        """Also back to that of the state that was loaded; what is being read is left."""
        for one in self.iterators:
            if one.place is not None:
                one.batches.close()
                one.over = StopIteration
        self.loader.set_epoch(epoch)
        self.coming = self.loaded if self.loaded and self.loaded[0] == epoch else (epoch, 0)

    @precondition(lambda self: self.iterators)
    @rule(which=WHICH)
    def close(self, which):
        one = self.iterators[which % len(self.iterators)]
        one.batches.close()
        one.over = StopIteration

    @precondition(lambda self: self.iterators)
    @rule(which=WHICH)
    def drop(self, which):
        del self.iterators[which % len(self.iterators)]

    def teardown(self):
        if not hasattr(self, "iterators"):
            return
        for one in self.iterators:
            one.batches.close()
        assert soon(lambda: not self.ledger.problems(), 30), "\n".join(self.ledger.problems())
        self.folder.cleanup()


@pytest.mark.parametrize("way", [WAYS[0], WAYS[-1]], ids=str)
@pytest.mark.parametrize("read", [iter, StreamDataLoader.parts])
def test_a_loaded_state_ends_what_is_being_read(way, read):
    loader = StreamDataLoader(StreamDataset([9, 9], range, 2, time_steps=2), **way)
    for _ in range(2):
        next(begun := read(loader))
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(IteratorError):
            next(begun)


TestSecondUse = SecondUse.TestCase
TestSecondUse.settings = settings(random_cases(400, 40), stateful_step_count=20)
