"""Members side by side: each one's lanes are those that it has alone, whatever the others do."""

import itertools
import json
import multiprocessing
import os
import pickle
import signal
from dataclasses import dataclass, field
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from cases import key
from helpers import random_cases, soon
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import (
    ItemError,
    StateError,
    StreamDataLoader,
    StreamDataset,
    StreamError,
    WorkerDeathError,
    merge_states,
    sections,
    side_by_side,
    split_state,
)
from stream_dataloader._assembly.regroup import Regrouper


@dataclass
class Member(cases.Case):
    """One member, small enough to be read again and again."""

    lengths: list = field(default_factory=lambda: [3, 5, 2])
    shuffle: bool = True
    known: bool = False
    cut: bool = False

    def dataset(self, number, time_steps, **options):
        return super().dataset(
            fill_value=-number,
            seed=number,
            time_steps=time_steps,
            lengths=self.lengths if self.known else None,
            sections=sections(self.lengths, 3) if self.cut else None,
            mark_ends=True,
            **options,
        )


@dataclass
class Case:
    members: list
    ends_with: str | int = "first"
    time_steps: int = 2

    def datasets(self):
        return [member.dataset(number, self.time_steps) for number, member in enumerate(self.members)]

    def loader(self, num_workers=0, **options):
        members = [(dataset, dataset.batch_size) for dataset in self.datasets()]
        return side_by_side(members, num_workers, ends_with=self.ends_with, **options)

    def expected(self, epochs, most=30):
        """What each epoch is to hold: for each batch, each member's own batch or None. A model in ten lines."""
        endless = [member.padding_mode == "cycle" for member in self.members]
        alone = [StreamDataLoader(dataset) for dataset in self.datasets()]
        runs = [iter(loader) if never else None for loader, never in zip(alone, endless, strict=True)]
        for _ in range(epochs):
            ending = [None if never else list(loader) for loader, never in zip(alone, endless, strict=True)]
            counts = [len(batches) for batches in ending if batches is not None]
            ends = {"first": min(counts, default=most), "longest": max(counts, default=most)}
            count = ends[self.ends_with] if isinstance(self.ends_with, str) else len(ending[self.ends_with])
            yield [
                [
                    next(run) if run else batches[step] if step < len(batches) else None
                    for run, batches in zip(runs, ending, strict=True)
                ]
                for step in range(count)
            ]


def members_of(known):
    """Random members, which all say their lengths, or some."""

    def build(case, known, cut):
        case.lengths[0] = max(1, case.lengths[0])
        return Member(**{**vars(case), "known": known, "cut": cut})

    modes = ("zeros", "data", "drop", "cycle")
    plain = cases.cases(max_streams=6, max_length=7, max_lanes=3, modes=modes)
    return st.builds(build, plain, st.sampled_from(known), st.booleans())


@st.composite
def some(draw, known=(False, True)):
    members = draw(st.lists(members_of(known), min_size=1, max_size=3))
    ending = [number for number, member in enumerate(members) if member.padding_mode != "cycle"]
    return Case(members, draw(st.sampled_from(["first", "longest", *ending])), draw(st.integers(1, 3)))


FIELDS = ("data", "is_start", "is_last", "mask", "source", "position")


def check(batch, members, case):
    """A batch holds each member's own, or its padding."""
    assert batch.member.tolist() == [m for m, member in enumerate(case.members) for _ in range(member.lanes)]
    assert batch.lane.tolist() == list(range(len(batch)))
    assert (batch.reset == batch.is_start[0]).all()
    assert batch.mask.any()
    for number, own in enumerate(members):
        rows = batch.member == number
        if own is None:
            assert (batch.data[:, rows] == -number).all()
            assert not batch.mask[:, rows].any()
            assert not batch.is_start[:, rows].any()
            assert not batch.is_last[:, rows].any()
            assert (batch.source[:, rows] == -1).all()
            assert (batch.position[:, rows] == -1).all()
        else:
            for name in FIELDS:
                assert torch.equal(getattr(batch, name)[:, rows], getattr(own, name)), (number, name)


@random_cases(150)
@given(some())
def test_each_members_lanes_are_those_that_it_has_alone(case):
    loader = case.loader()
    for epoch, expected in enumerate(case.expected(3)):
        ends = any(member.padding_mode != "cycle" for member in case.members)
        batches = list(
            itertools.islice(loader, len(expected) + ends)
        )  # one more than there should be, if there is an end
        assert len(batches) == len(expected)
        for step, (batch, members) in enumerate(zip(batches, expected, strict=True)):
            assert (batch.step, batch.epoch) == (step, epoch)
            check(batch, members, case)


@random_cases(100)
@given(some(known=[True]))
def test_len_is_exact_where_the_lengths_are_known(case):
    loader = case.loader()
    if all(member.padding_mode == "cycle" for member in case.members):
        with pytest.raises(TypeError, match="pass batches_per_epoch="):
            len(loader)
        return
    for _ in range(3):
        count = len(loader)
        iterator = iter(loader)
        assert next(iterator, None) is None or len(loader) == count
        assert len(list(iterator)) == max(count - 1, 0)


@random_cases(150)
@given(some(), st.data())
def test_it_resumes_exactly_after_any_batch(case, data):
    """Each state is taken from a loader that was itself resumed, and goes through json."""

    def keys(loader, most=25):
        return [(key(batch), batch.member.tolist()) for batch in itertools.islice(loader, most)]

    whole = case.loader()
    endless = all(member.padding_mode == "cycle" for member in case.members)
    expected = [keys(whole) for _ in range(1 if endless else 2)]
    state = json.loads(json.dumps(case.loader().state_dict()))
    for epoch, batches in enumerate(expected):
        for step in range(len(batches) + 1):
            if state["epoch"] > epoch:
                assert step == len(batches)  # the end was known with the last batch
                break
            if data.draw(st.booleans()):
                resumed = case.loader()
                resumed.load_state_dict(state)
                assert keys(resumed, 25 - step) == batches[step:]
            loader = case.loader()
            loader.load_state_dict(state)
            assert json.loads(json.dumps(loader.state_dict())) == state
            iterator = iter(loader)
            if step == 25:
                return
            found = next(iterator, None)
            if step < len(batches):
                assert key(found) == batches[step][0]
                assert found.state_dict() == loader.state_dict()
            else:
                assert found is None
            state = json.loads(json.dumps(loader.state_dict()))
    assert endless or state["epoch"] == len(expected)


ENDLESS = {"padding_mode": "cycle"}
TWO = Case([Member([9, 4, 6, 3]), Member([2, 5, 1, 4], 3, windows="packed", cut=True, **ENDLESS)])


def test_a_state_goes_to_another_number_of_workers():
    iterator = iter(loader := TWO.loader(2))
    next(iterator)
    state = loader.state_dict()
    rest = [key(batch) for batch in iterator]
    other = TWO.loader(1)
    other.load_state_dict(state)
    assert [key(batch) for batch in other] == rest
    assert [key(batch) for batch in other] == [key(batch) for batch in loader]  # the endless member goes on, too


def test_an_endless_run_is_cut_into_epochs_of_n_batches():
    case = Case([Member([9, 4], **ENDLESS), Member([2, 5, 1], 1, cut=True, **ENDLESS)])
    run = [key(batch)[:-2] for batch in itertools.islice(case.loader(), 9)]
    loader = case.loader(batches_per_epoch=3)
    assert len(loader) == 3
    assert [key(batch)[:-2] for _ in range(3) for batch in loader] == run
    for step in range(1, 4):
        iterator = iter(loader := case.loader(batches_per_epoch=3))
        for _ in range(step):
            next(iterator)
        state, other = loader.state_dict(), case.loader(batches_per_epoch=3)
        assert (state["epoch"], state["step"]) == divmod(step, 3)
        other.load_state_dict(state)
        assert [key(batch)[:-2] for _ in range(2) for batch in other] == run[step : 6 + step // 3 * 3]


def test_an_endless_member_goes_on_after_a_break():
    loader, run = TWO.loader(), iter(StreamDataLoader(TWO.datasets()[1]))
    for count in (1, 3, 2):
        for batch in itertools.islice(loader, count):
            assert torch.equal(batch.data[:, 2:], next(run).data)


def test_a_set_epoch_begins_there_and_the_coming_one_changes_nothing():
    loader, other = TWO.loader(), TWO.loader()
    first = [key(batch) for batch in loader]
    loader.set_epoch(1)
    second = [key(batch) for batch in loader]
    assert second == [key(batch) for _ in range(2) for batch in other][len(first) :]
    loader.set_epoch(0)
    assert [key(batch) for batch in loader] == first


def test_ranks_share_every_member():
    members = [Member([9, 4, 6, 3, 2, 8], known=True), Member([2, 5, 1, 4], **ENDLESS)]
    batches = [list(Case(members).loader(rank=rank, world_size=2)) for rank in range(2)]
    assert len(batches[0]) == len(batches[1]) > 0
    cells = [tuple(cell) for own in batches for b in own for cell in b.data[:, :2][b.mask[:, :2]][:, :2].tolist()]
    assert len(cells) == len(set(cells))


def test_a_batch_keeps_its_members_wherever_it_goes():
    batch = next(iter(TWO.loader()))
    there = batch.to("meta")
    assert there.member.device.type == "meta"
    assert there.host.member.tolist() == batch.member.tolist()
    assert pickle.loads(pickle.dumps(batch)).member.tolist() == [0, 0, 1, 1, 1]


def test_leaves_that_are_objects_and_keys_in_another_order():
    def one(source):
        for position in range(source):
            yield {"x": np.float32(position), "name": f"a{position}"}

    def other(source):
        for position in range(source):
            yield {"name": f"b{position}", "x": np.float32(-position)}

    datasets = [StreamDataset([3], one, 1, time_steps=2), StreamDataset([2], other, 1, time_steps=2, fill_value=7)]
    batches = list(side_by_side([(dataset, 1) for dataset in datasets], ends_with="longest"))
    assert [batch.data["name"] for batch in batches] == [[["a0", "b0"], ["a1", "b1"]], [["a2", None], [None, None]]]
    assert batches[1].data["x"].tolist() == [[2, 7], [0, 7]]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (np.zeros(3, np.float32), r"float32 \(3,\), and in the first was float32 \(2,\)"),
        (np.zeros(2, np.int64), r"int64 \(2,\), and in the first was float32 \(2,\)"),
        ({"x": np.zeros(2, np.float32)}, "it has leaves"),
    ],
)
def test_members_that_do_not_fit_beside_each_other_are_an_error(item, text):
    datasets = [
        StreamDataset([3], lambda n, item=item: itertools.repeat(item, n), 1, time_steps=2)
        for item in (np.zeros(2, np.float32), item)
    ]
    loader = side_by_side([(dataset, 1) for dataset in datasets])
    with pytest.raises(ItemError, match=rf"members\[1\], source 0 .*members\[0\], source 0.*{text}"):
        next(iter(loader))


def test_an_error_in_a_member_is_raised_and_ends_the_epoch():
    def broken(source):
        yield from range(source)
        raise OSError("lost")

    good = StreamDataset([9], range, 1, time_steps=2)
    bad = StreamDataset([3], broken, 1, time_steps=2)
    iterator = iter(side_by_side([(good, 1), (bad, 1)], 2))
    next(iterator)
    with pytest.raises(StreamError, match="lost"):
        next(iterator)
    assert next(iterator, None) is None
    assert soon(lambda: not multiprocessing.active_children())


def test_states_of_other_loaders_are_refused():
    iterator = iter(loader := TWO.loader())
    next(iterator)
    state = loader.state_dict()
    with pytest.raises(StateError, match="no state of a side_by_side loader"):
        loader.load_state_dict(StreamDataLoader(TWO.datasets()[0]).state_dict())
    with pytest.raises(StateError, match=r"ends_with 'first'.*'longest'"):
        Case(TWO.members, "longest").loader().load_state_dict(state)
    with pytest.raises(StateError, match=r"number of members 2.* 1"):
        Case(TWO.members[:1]).loader().load_state_dict(state)
    with pytest.raises(StateError, match=r"members\[1\]: .*other sources"):
        Case([TWO.members[0], Member([2, 5, 1, 5], 3, windows="packed", **ENDLESS)]).loader().load_state_dict(
            {**state, "members": [state["members"][0], {**state["members"][1], "sections": None, "num_sources": 4}]}
        )
    with pytest.raises(StateError):
        loader.load_state_dict({name: value for name, value in state.items() if name != "over"})


ONE = Member().dataset(0, 2)


@pytest.mark.parametrize(
    ("members", "options", "error", "text"),
    [
        ([], {}, ValueError, "members is empty"),
        ([ONE], {}, TypeError, r"members\[0\] must be a StreamDataset and its number of lanes"),
        ([(ONE, 0)], {}, ValueError, r"members\[0\]\[1\], the number of lanes, is 0"),
        ([(ONE, 1), (Member().dataset(1, 3), 1)], {}, ValueError, r"time_steps=2, and members\[1\] time_steps=3"),
        ([(StreamDataset([3], range, 1), 1)], {}, ValueError, "pass time_steps="),
        ([(ONE, 1)], {"ends_with": "last"}, ValueError, "ends_with is 'last'"),
        ([(ONE, 1)], {"batches_per_epoch": 3}, ValueError, r"members\[0\] ends by itself"),
        ([(ONE, 1)], {"shuffle": True}, TypeError, "shuffle"),
        ([(ONE, 1)], {"ends_with": 1}, ValueError, "at most 0"),
        ([(Member(padding_mode="cycle").dataset(0, 2), 1)], {"ends_with": 0}, ValueError, "never ends"),
        ([(ONE, 1)], {"num_workers": [1, 1]}, ValueError, "num_workers has 2 numbers, and there are 1 members"),
        ([(Member(padding_mode="drop").dataset(0, 2), 9)], {}, ValueError, "lower batch_size"),
    ],
)
def test_what_cannot_be_put_side_by_side_is_refused(members, options, error, text):
    with pytest.raises(error, match=text):
        side_by_side(members, **options)


# What a loader offers holds for all of its lanes.


def three(mode="zeros", ends_with="longest"):
    first = Member([9, 4, 6, 3, 8, 12, 15, 2], padding_mode=mode, shuffle=False)
    others = [Member([30, 20, 25, 30], shuffle=False), Member([2, 5, 1, 4], shuffle=False, **ENDLESS)]
    return Case([first, *others], ends_with)


def windows_of(found):
    return [batch.data.tolist() for batch in found]


def test_it_is_a_loader_with_stats_and_a_progress_bar(monkeypatch):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread of tqdm's
    found = three().loader()
    assert isinstance(found, StreamDataLoader)
    batches = list(found.progress(disable=True))
    stats = found.stats()
    assert stats.batches == len(batches)
    assert stats.items == sum(int((batch.source >= 0).sum()) for batch in batches)
    assert stats.cells == len(batches) * 2 * 6
    assert stats.setup.lanes == 6
    assert len(stats.workers) == 3  # one of each member


@pytest.mark.parametrize(
    "options", [{}, {"transport": "queue"}, {"worker_method": "thread"}, {"threads_per_worker": 2}], ids=str
)
@pytest.mark.parametrize("mode", ["zeros", "drop"])
@pytest.mark.parametrize("num_workers", [3, [1, 0, 2]])
def test_a_member_that_has_ended_is_padded_whoever_reads_it(options, mode, num_workers):
    assert windows_of(three(mode).loader(num_workers, **options)) == windows_of(three(mode).loader())


@pytest.mark.parametrize("num_workers", [0, 3])
def test_parts_are_each_workers_lanes(num_workers):
    whole, parts = (three().loader(num_workers) for _ in range(2))
    parts = list(parts.parts())
    for batch in whole:
        own = [part for part in parts if part.step == batch.step]
        assert [part.worker for part in own] == [number for number in range(3) if number in {p.worker for p in own}]
        for part in own:
            assert torch.equal(part.data, batch.data[:, part.lane])
            assert torch.equal(part.member, batch.member[part.lane])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_takes_the_windows_of_all_lanes(num_workers):
    found = three().loader(num_workers, collate_fn=lambda windows: torch.stack(windows, 1))
    assert [batch.tolist() for batch in found] == windows_of(three().loader())


@pytest.mark.parametrize("num_workers", [0, 3])
def test_batches_are_put_together_in_place(num_workers, monkeypatch):
    monkeypatch.delattr(Regrouper, "_column")  # what puts readers' windows side by side, if they lie elsewhere
    found = three(ends_with="first").loader(num_workers)
    for batch in found:
        assert batch.data.shape == (2, 6, 3)
    assert found.stats().copies == 0


@dataclass
class Deadly(cases.Counting):
    """Kills its worker at an item of a source of 25: once, or whenever it is read."""

    path: Path = Path()
    always: bool = False

    def __call__(self, source):
        for position, item in enumerate(super().__call__(source)):
            if source[1] == 25 and position == 3 and (self.always or not self.path.exists()):
                self.path.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def deadly(path, always, **options):
    members = three().members
    datasets = [member.dataset(number, 2, on_error="skip") for number, member in enumerate(members)]
    datasets[1] = members[1].dataset(1, 2, on_error="skip", open_stream=Deadly(path=path, always=always))
    return side_by_side([(own, 2) for own in datasets], 3, ends_with="longest", **options)


def test_all_members_continue_after_a_worker_of_one_died(tmp_path):
    assert windows_of(deadly(tmp_path / "died", always=False, max_restarts=1)) == windows_of(three().loader())
    (tmp_path / "died").unlink()
    with pytest.raises(WorkerDeathError) as death:
        list(deadly(tmp_path / "died", always=False))
    assert death.value.member == 1


@pytest.mark.filterwarnings("ignore:skipped")
def test_a_source_that_kills_its_worker_is_skipped_in_its_own_member(tmp_path):
    found = deadly(tmp_path / "died", always=True, max_restarts=3)
    batches = list(found)
    assert [(error.source_index, error.position) for error in found.failures] == [(2, 2)]
    read = {m: {int(s) for b in batches for s in b.source[:, b.member == m].flatten() if s >= 0} for m in range(2)}
    assert read == {0: set(range(8)), 1: set(range(4))}


def test_a_copy_goes_on_where_the_loader_stands():
    found, other = (three(ends_with="first").loader() for _ in range(2))
    for own in (found, other):
        iterator = iter(own)
        for _ in range(3):
            next(iterator)
    copied = pickle.loads(pickle.dumps(found))
    assert found.state_dict()["step"] == 3  # it is still being read
    assert windows_of(copied) == windows_of(other)
    assert windows_of(pickle.loads(pickle.dumps(copied))) == windows_of(other)


def test_a_state_of_all_ranks_is_dealt_to_others():
    def rank(number, world_size):
        members = [Member([9, 4, 6, 3, 8, 12, 15, 2], 4 // world_size, known=True)]
        members.append(Member([30, 20, 25, 30], 4 // world_size, known=True))
        return Case(members, "longest").loader(rank=number, world_size=world_size, groups=2)

    whole = rank(0, 1)
    expected = windows_of(whole)
    ranks = [rank(0, 2), rank(1, 2)]
    for own in ranks:
        iterator = iter(own)
        for _ in range(3):
            next(iterator)
    merged = merge_states([own.state_dict() for own in ranks])
    whole.load_state_dict(merged)
    assert windows_of(whole) == expected[3:]
    for number, state in enumerate(split_state(merged, 2)):
        other = rank(number, 2)
        other.load_state_dict(state)
        assert windows_of(other) == windows_of(ranks[number])[3:] or other.epoch
