"""Members side by side: each one's lanes are those that it has alone, whatever the others do."""

import itertools
import multiprocessing
import pickle
from dataclasses import dataclass, field

import cases
import numpy as np
import pytest
import torch
from cases import key, keys
from helpers import random_cases, soon
from hypothesis import given
from hypothesis import strategies as st
from worker_streams import few, kill_self

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, errors, merge_states, side_by_side
from stream_dataloader.testing import check_resume


@dataclass
class Member(cases.Case):
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
            sections=Sections(3, jitter=True, lengths=self.lengths) if self.cut else None,
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


FIELDS = ("data", "is_first", "is_last", "mask", "source_index", "position")


def check(batch, members, case):
    assert batch.member.tolist() == [m for m, member in enumerate(case.members) for _ in range(member.lanes)]
    assert batch.lane.tolist() == list(range(len(batch)))
    assert (batch.reset == batch.is_first[0]).all()
    assert batch.mask.any()
    padding = {"is_first": 0, "is_last": 0, "mask": 0, "source_index": -1, "position": -1}
    for number, own in enumerate(members):
        rows = batch.member == number
        for name in FIELDS:
            found = getattr(batch, name)[:, rows]
            assert (found == (padding.get(name, -number) if own is None else getattr(own, name))).all(), (number, name)


@random_cases(250)
@given(st.one_of(some(), some(known=[True])))
def test_each_members_lanes_are_those_that_it_has_alone(case):
    loader = case.loader()
    ends = any(member.padding_mode != "cycle" for member in case.members)
    known = ends and all(member.known for member in case.members)
    for epoch, expected in enumerate(case.expected(3)):
        assert not known or len(loader) == len(expected)
        batches = list(itertools.islice(loader, len(expected) + ends))  # one too many, if there is an end
        assert [(b.batch_index, b.epoch) for b in batches] == [(step, epoch) for step in range(len(expected))]
        for batch, members in zip(batches, expected, strict=True):
            check(batch, members, case)


@random_cases(50, quick=3)
@given(some())
def test_it_resumes_exactly_after_any_batch(case):
    endless = all(member.padding_mode == "cycle" for member in case.members)
    options = {"epochs": 1, "limit": 12} if endless else {}
    check_resume(case.loader, num_workers=(0,), **options)


ENDLESS = {"padding_mode": "cycle"}
TWO = Case([Member([9, 4, 6, 3]), Member([2, 5, 1, 4], 3, windows="packed", cut=True, **ENDLESS)])


def state_after(loader, count=1):
    list(itertools.islice(loader, count))
    return loader.state_dict()


def test_an_endless_run_is_cut_into_epochs_of_n_batches():
    case = Case([Member([9, 4], **ENDLESS), Member([2, 5, 1], 1, cut=True, **ENDLESS)])
    run = [key(batch)[:-2] for batch in itertools.islice(case.loader(), 9)]
    loader = case.loader(batches_per_epoch=3)
    assert len(loader) == 3
    with pytest.raises(TypeError, match="pass batches_per_epoch="):
        len(case.loader())
    assert [key(batch)[:-2] for _ in range(3) for batch in loader] == run
    for step in range(1, 4):
        state, other = state_after(case.loader(batches_per_epoch=3), step), case.loader(batches_per_epoch=3)
        assert (state["epoch"], state["step"]) == divmod(step, 3)
        other.load_state_dict(state)
        assert [key(batch)[:-2] for _ in range(2) for batch in other] == run[step : 6 + step // 3 * 3]


def test_a_set_epoch_begins_there_and_the_coming_one_changes_nothing():
    loader, other = TWO.loader(), TWO.loader()
    first = keys(loader)
    loader.set_epoch(1)
    second = keys(loader)
    assert second == [key(batch) for _ in range(2) for batch in other][len(first) :]
    loader.set_epoch(0)
    assert keys(loader) == first


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


@pytest.mark.parametrize("item", [np.zeros(3, np.float32), np.zeros(2, np.int64), {"x": np.zeros(2, np.float32)}])
def test_members_that_do_not_fit_beside_each_other_are_an_error(item):
    datasets = [
        StreamDataset([3], lambda n, item=item: itertools.repeat(item, n), 1, time_steps=2)
        for item in (np.zeros(2, np.float32), item)
    ]
    with pytest.raises(errors.ItemError, match=r"members\[1\], source 0 .*members\[0\], source 0"):
        next(iter(side_by_side([(dataset, 1) for dataset in datasets])))


def test_an_error_in_a_member_is_raised_and_ends_the_epoch():
    def broken(source):
        yield from range(source)
        raise OSError("lost")

    streams = (range, "zeros"), (broken, "cycle"), (broken, "zeros")  # an endless member is asked last
    datasets = [StreamDataset([3], stream, 1, mode, time_steps=2) for stream, mode in streams]
    iterator = iter(side_by_side([(dataset, 1) for dataset in datasets], 3, ends_with="longest"))
    next(iterator)
    with pytest.raises(errors.StreamError) as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.lane == 1, "of two, the lowest lane's"
    with pytest.raises(errors.IteratorError, match="after 1 batches, before its epoch was over"):
        next(iterator)
    assert soon(lambda: not multiprocessing.active_children())


def test_states_of_other_loaders_are_refused():
    state = state_after(TWO.loader())
    one, other = state["members"]
    changed = Case([TWO.members[0], Member([2, 5, 1, 5], 3, windows="packed", **ENDLESS)])
    for case, loaded, text in [
        (TWO, StreamDataLoader(TWO.datasets()[0]).state_dict(), "no state of a side_by_side loader"),
        (TWO, {name: value for name, value in state.items() if name != "over"}, "over"),
        (Case(TWO.members, "longest"), state, r"ends_with 'first'.*'longest'"),
        (Case(TWO.members[:1]), state, r"number of members 2.* 1"),
        (changed, {**state, "members": [one, {**other, "sections": None, "num_sources": 4}]}, r"members\[1\]: "),
    ]:
        with pytest.raises(errors.StateError, match=text):
            case.loader().load_state_dict(loaded)


ONE = Member().dataset(0, 2)


@pytest.mark.parametrize(
    ("members", "options", "error", "names"),
    [
        ([], {}, ValueError, "members"),
        ([ONE], {}, TypeError, r"members\[0\]"),
        ([(ONE, 0)], {}, ValueError, r"members\[0\]\[1\]"),
        ([(ONE, 1), (Member().dataset(1, 3), 1)], {}, ValueError, r"time_steps=2, and members\[1\] time_steps=3"),
        ([(StreamDataset([3], range, 1), 1)], {}, ValueError, "time_steps="),
        ([(ONE, 1)], {"ends_with": "last"}, ValueError, "ends_with"),
        ([(ONE, 1)], {"ends_with": 1}, ValueError, "ends_with"),
        ([(Member(padding_mode="cycle").dataset(0, 2), 1)], {"ends_with": 0}, ValueError, "never ends"),
        ([(ONE, 1)], {"batches_per_epoch": 3}, ValueError, r"members\[0\] ends by itself"),
        ([(ONE, 1)], {"shuffle": True}, TypeError, "shuffle"),
        ([(ONE, 1)], {"num_workers": [1, 1]}, ValueError, "num_workers"),
        ([(Member(padding_mode="drop").dataset(0, 2), 9)], {}, ValueError, "lower batch_size"),
    ],
)
def test_what_cannot_be_put_side_by_side_is_refused(members, options, error, names):
    with pytest.raises(error, match=names):
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
    items = sum(int((batch.source_index >= 0).sum()) for batch in batches)
    assert (stats.batches, stats.items, stats.cells) == (len(batches), items, len(batches) * 2 * 6)
    assert (stats.setup.lanes, len(stats.workers)) == (6, 3)  # a worker of each member
    members = [member.loader.stats() for member in found._members]
    assert stats.setup.sources == sum(member.setup.sources for member in members)
    assert stats.bytes == sum(member.bytes for member in members) > max(member.bytes for member in members)
    found.load_state_dict(batches[0].state_dict())
    assert found._kept_lanes.lanes == list(range(6)), "of all members, for what is carried"
    few = StreamDataset([4] * 9, range, 1, time_steps=2)
    assert side_by_side([(few, 1), (few, 9)], 2).num_workers == 3  # at least one for each member


@pytest.mark.parametrize("options", [{}, {"worker_method": "thread"}], ids=str)
@pytest.mark.parametrize(("mode", "num_workers"), [("zeros", 3), ("drop", [1, 0, 2])])
def test_a_member_that_has_ended_is_padded_whoever_reads_it(options, mode, num_workers):
    assert windows_of(three(mode).loader(num_workers, **options)) == windows_of(three(mode).loader())


@pytest.mark.parametrize("num_workers", [0, 3])
def test_parts_are_each_workers_lanes(num_workers):
    whole, parts = (three().loader(num_workers) for _ in range(2))
    parts = list(parts.parts())
    for batch in whole:
        own = [part for part in parts if part.batch_index == batch.batch_index]
        assert [part.worker for part in own] == [number for number in range(3) if number in {p.worker for p in own}]
        for part in own:
            assert torch.equal(part.data, batch.data[:, part.lane])
            assert torch.equal(part.member, batch.member[part.lane])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("members", [slice(None), slice(1, None, -1)], ids=["first ends", "second ends"])
def test_a_collate_fn_takes_the_windows_of_all_lanes(num_workers, members):
    case = Case(three().members[members], "longest")
    found = case.loader(num_workers, collate_fn=lambda windows: torch.stack(windows, 1))
    assert [batch.tolist() for batch in found] == windows_of(case.loader())


def deadly(path, times, **options):
    """A source of 25 kills its worker at an item, the first times that it is read."""
    die = few(path, kill_self, times)

    def read(source):
        for position, item in enumerate(cases.Counting()(source)):
            if source[1] == 25 and position == 3:
                die()
            yield item

    members = enumerate(three().members)
    datasets = [own.dataset(number, 2, on_error="skip", open_stream=read) for number, own in members]
    return side_by_side([(own, 2) for own in datasets], 3, ends_with="longest", **options)


def test_all_members_continue_after_a_worker_of_one_died(tmp_path):
    loader = deadly(tmp_path / "died", 1, max_restarts=1)
    assert windows_of(loader) == windows_of(three().loader())
    assert loader.stats().restarts == 1
    (tmp_path / "died").unlink()
    with pytest.raises(errors.WorkerDeathError) as death:
        list(deadly(tmp_path / "died", 1))
    assert death.value.member == 1


@pytest.mark.filterwarnings("ignore:skipped")
def test_a_source_that_kills_its_worker_is_skipped_in_its_own_member(tmp_path):
    found = deadly(tmp_path / "died", 9, max_restarts=3)
    batches = list(found)
    assert [(error.source_index, error.position) for error in found.failures] == [(2, 2)]
    read = {
        m: {int(s) for b in batches for s in b.source_index[:, b.member == m].flatten() if s >= 0} for m in range(2)
    }
    assert read == {0: set(range(8)), 1: set(range(4))}


def test_a_state_of_all_ranks_is_dealt_to_others():
    def rank(number, world_size):
        lanes = 4 // world_size
        members = [Member(lengths, lanes, known=True) for lengths in ([9, 4, 6, 3, 8, 12, 15, 2], [30, 20, 25, 30])]
        return Case(members, "longest").loader(rank=number, world_size=world_size, virtual_ranks=2)

    expected = windows_of(rank(0, 1))
    of_ranks = [windows_of(rank(number, 2)) for number in range(2)]
    merged = merge_states([state_after(rank(number, 2), 3) for number in range(2)])
    whole = rank(0, 1)
    whole.load_state_dict(merged)
    assert windows_of(whole) == expected[3:]
    for number in range(2):
        other = rank(number, 2)
        other.load_state_dict(merged)
        assert windows_of(other) == of_ranks[number][3:]


def numbered(path):
    """Three members whose workers leave their numbers, the last of which breaks."""

    def broken(source):
        yield from range(source // 2)
        raise OSError("lost")

    factories = (range, range, broken)
    datasets = [StreamDataset([8, 8], each, 1, time_steps=2, fill_value=0) for each in factories]
    return side_by_side([(own, 2) for own in datasets], 3, worker_init_fn=lambda number: (path / str(number)).touch())


def test_workers_and_lanes_are_numbered_over_all_members(tmp_path):
    loader = numbered(tmp_path)
    iterator = iter(loader)
    assert next(iterator).worker_id.tolist() == [0, 0, 1, 1, 2, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}
    next(iterator)
    with pytest.raises(errors.StreamError, match=r"^members\[2\]: source 0 ") as raised:
        next(iterator)
    assert (raised.value.lane, raised.value.worker_id) == (4, 2)
    events = loader.stats().events
    assert {event.worker for event in events if event.kind == "open"} == {0, 1, 2}
    loader.worker_init_fn = lambda number: (tmp_path / f"again {number}").touch()
    next(iter(loader))
    assert {path.name for path in tmp_path.glob("again *")} == {"again 0", "again 1", "again 2"}


@pytest.mark.filterwarnings("ignore:skipped")
def test_what_members_skip_is_told_with_the_batchs_lanes():
    def broken(source):
        yield from range(source)
        raise OSError("lost")

    datasets = [
        StreamDataset([4], range, 1, time_steps=2),
        StreamDataset([2], broken, 1, time_steps=2, on_error="skip"),
    ]
    loader = side_by_side([(own, 1) for own in datasets], ends_with="longest")
    assert len(list(loader)) == 2
    assert [(failure.lane, failure.source_index) for failure in loader.failures] == [(1, 0)]
    assert loader.stats().skipped == 1


def test_an_endless_member_is_asked_only_for_what_is_delivered():
    opened = []

    def watched(source):
        opened.append(source)
        yield source

    ending = StreamDataset([2], range, 1, time_steps=2)
    endless = StreamDataset(list(range(9)), watched, 1, time_steps=1 + 1, windows="aligned", **ENDLESS)
    loader = side_by_side([(endless, 1), (ending, 1)])
    for epoch in range(3):
        assert len(list(loader)) == 1
        assert opened == list(range(epoch + 1))


def test_a_copy_continues_in_mid_epoch_by_itself():
    loader = TWO.loader()
    batches = iter(loader)
    next(batches)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.state_dict() == loader.state_dict()
    assert [key(batch) for batch in copied] == [key(batch) for batch in batches]
    copied = pickle.loads(pickle.dumps(loader))
    assert [key(batch) for batch in copied] == [key(batch) for batch in loader], "endless members go on"
