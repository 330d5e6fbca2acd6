"""Bad input: what the user sees. Nothing hangs, nothing is lost in silence."""

import copy
import itertools
import pickle
import traceback
from operator import attrgetter, methodcaller

import numpy as np
import pytest
import torch
from helpers import declared, make_loader
from torch.utils.data import DataLoader
from worker_streams import acting, raising

from stream_dataloader import StreamDataLoader, StreamDataset, errors, regroup, side_by_side


class Frame:
    """Iterates over the names of its columns, as the data frames of pandas do."""

    columns = ("path", "label")

    def __iter__(self):
        return iter(self.columns)


ONE, THREAD = {"num_workers": 1}, {"num_workers": 1, "worker_method": "thread"}
#: Of each, the last option is wrong, and the error names it.
WRONG_VALUES = [
    {"sources": []},
    {"sources": [1, 2, 3], "batch_size": 0},
    {"padding_mode": "none"},
    {"time_steps": None, "windows": "packed"},
    {"time_steps": 0},
    {"lookahead": -1},
    {"lookahead": 10**6},
    {"shuffle": True, "schedule": "balanced"},
    {"lengths": [1, 2, 3], "schedule": "balanced"},
    {"schedule": "listed"},
    {"lengths": [1]},
    {"lengths": [1, 2, -3]},
    {"lengths": np.array([1, 2, 2**63], np.uint64)},
    {"seed": -1},
    {"on_error": "ignore"},
    {"windows": np.array(["packed", "aligned"])},
    {"padding_mode": "drop", "batch_size": 4},
    {"num_workers": -1},
    {**ONE, "prefetch_factor": 0},
    {"persistent_workers": True},
    {"timeout": -1},
    {"device": "cudaa"},
    {**THREAD, "max_restarts": 2},
    {**THREAD, "multiprocessing_context": "fork"},
    {**ONE, "worker_method": "threads"},
]
WRONG_TYPES = [
    {"sources": "clip.mp4"},
    {"sources": None},
    {"sources": {"a"}},
    {"sources": {"a": 1}},
    {"open_stream": 3},
    {"shuffle": "False"},
    {"fingerprint": 5},
    {"collate_fn": 3},
    {**ONE, "worker_init_fn": 3},
    {"timeout": "5"},
    {"pin_memory": "False"},
    {**ONE, "persistent_workers": "no"},
    {**ONE, "multiprocessing_context": 5},
    {"device": 1.5},
]


def build(options):
    return make_loader(**({"sources": [1, 2, 3], "open_stream": range, "batch_size": 2, "time_steps": 2} | options))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind, given in ((ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)) for options in given],
    ids=str,
)
def test_a_wrong_option_is_an_error_where_it_is_built(kind, options):
    with pytest.raises(kind, match=list(options)[-1]):
        build(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sources": "clip.mp4"}, r"is one str; pass \[source\]"),
        (
            {"sources": Frame()},
            r"is a Frame, whose columns would be read, and not its rows; pass one column, or a list",
        ),
        ({"sources": [1, (i for i in ())]}, "source 1 .*generator.*cannot be pickled"),
        ({"batch_size": 0}, "batch_size is 0, and must be at least 1"),
        ({"padding_mode": "none"}, "padding_mode is 'none', and must be one of 'zeros', 'data', 'drop', 'cycle'"),
        ({"shuffle": "False"}, "shuffle must be True or False, and is 'False', a str"),
    ],
)
def test_an_error_of_an_option_says_what_is_wrong_and_what_to_do(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        build(options)


def test_more_workers_than_lanes_are_as_many_as_lanes_with_one_warning():
    with pytest.warns(UserWarning, match="num_workers is 4") as caught:
        loader = make_loader([3, 3], range, 2, time_steps=2, num_workers=4)
    assert len(caught) == 1
    assert loader.num_workers == 2
    assert next(iter(loader)).worker_id.tolist() == [0, 1]


def items(source, broken=None):
    for i in range(4):
        if i == broken:
            raise OSError("disk gone")
        yield np.array([source, i])


class BrokenIter:
    def __iter__(self):
        raise OSError("disk gone")


def no_such_clip(source):
    raise FileNotFoundError("no such clip")


#: What is opened of a source that is broken, and the error that comes of it: where, and of what.
BROKEN = {
    "raises": (no_such_clip, errors.OpenError, 0, FileNotFoundError),
    "is no iterable": (int, errors.OpenError, 0, TypeError),
    "iter raises": (lambda source: BrokenIter(), errors.OpenError, 0, OSError),
    "first item": (lambda source: items(source, 0), errors.ReadError, 0, OSError),
    "midway": (lambda source: items(source, 3), errors.ReadError, 3, OSError),
}


def opener(how):
    return lambda source: (BROKEN[how][0] if source == 2 else items)(source)


@pytest.mark.one_of_each
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_stream_raises_at_its_own_step_and_says_where(how, workers, early):
    _, kind, position, cause = BROKEN[how]
    dataset = StreamDataset(range(4), declared(opener(how), early=early), 2, time_steps=2, lookahead=int(early))
    batches = []
    with pytest.raises(kind, match=f"source 2 .2., item {position}, lane 0, worker 0") as caught:
        batches.extend(iter(StreamDataLoader(dataset, workers)))
    error = caught.value
    assert isinstance(error, errors.StreamError)
    assert error.place == {"source_index": 2, "source": "2", "position": position, "lane": 0, "worker_id": 0}
    assert len(batches) == 2 + position // 2
    assert isinstance(error.__cause__, cause)
    if cause is not TypeError:
        assert __file__ in "".join(traceback.format_exception(error)), "the original traceback is kept"


async def asynchronous(_):
    yield 1


@pytest.mark.parametrize(
    ("open_stream", "said"),
    [
        (lambda n: None, r"returned None \(NoneType\), which is no iterable; return or yield items"),
        (lambda n: lambda: range(n), r"\(function\), which is no iterable; call it, or return or yield items"),
        (asynchronous, r"\(async_generator\), which is no iterable; run it .* in an event loop"),
        (lambda n: [1, 2.5], r"item 1, .*is float64 \(\), and was int64 \(\); .* convert, resize or pad them"),
    ],
)
def test_what_a_beginner_returns_is_an_error_that_says_what_to_do(open_stream, said):
    with pytest.raises(errors.StreamError, match=said):
        list(make_loader([3], open_stream, 1, time_steps=2))


def test_a_policy_decides_per_error():
    seen = []

    def policy(error):
        seen.append(type(error))
        return "skip" if isinstance(error, errors.OpenError) else "raise"

    with pytest.warns(RuntimeWarning):
        list(StreamDataLoader(StreamDataset(range(4), opener("raises"), 2, time_steps=2, on_error=policy)))
    with pytest.raises(errors.ReadError):
        list(StreamDataLoader(StreamDataset(range(4), opener("midway"), 2, time_steps=2, on_error=policy)))
    assert seen == [errors.OpenError, errors.ReadError]


def confused(_):
    raise KeyError("severity")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (lambda _: "Skip", "returned 'Skip'"),
        (bool, "returned True"),
        (lambda _: np.array(["skip"]), "returned array"),
        (confused, "raised KeyError"),
    ],
)
def test_a_policy_without_one_of_the_two_answers_is_an_error_at_its_step(policy, told, workers):
    dataset, batches = StreamDataset(range(4), opener("midway"), 2, time_steps=2, on_error=policy), []
    with pytest.raises(errors.ReadError, match=rf"on_error {told}.*'raise' or 'skip'.*source 2 .2., item 3") as caught:
        batches.extend(iter(StreamDataLoader(dataset, workers)))
    assert (caught.value.source_index, caught.value.position, len(batches)) == (2, 3, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_without_any_item_warns_and_an_endless_one_is_an_error(workers):
    def loader(mode, *lengths):
        return StreamDataLoader(StreamDataset([*lengths, 0, 0, 0, 0], range, 3, mode, time_steps=2), workers)

    for mode, lengths, why in (
        ("zeros", (), "none of its 4 streams yielded"),
        ("data", (), "none of its 4 streams yielded"),
        ("drop", (0, 5, 0), r"padding_mode=.drop. ends it with the first idle lane.* smaller batch_size or time_steps"),
    ):
        for read in (iter, StreamDataLoader.parts):
            with pytest.warns(RuntimeWarning, match=f"no batch, as {why}.* first source, 0") as told:
                assert not list(read(loader(mode, *lengths)))
            assert told[0].filename == __file__ or read is not iter
    with pytest.raises(errors.EmptySourcesError):
        next(iter(loader("cycle")))
    begun = loader("zeros", 2)
    next(iter(begun))
    resumed = loader("zeros", 2)
    resumed.load_state_dict(begun.state_dict())
    assert not list(resumed)  # without a warning: it had its batches before the state


def test_an_endless_run_goes_on_although_nearly_all_sources_are_empty():
    options = {"time_steps": 1, "shuffle": True, "seed": 0, "lookahead": 0}
    loader = StreamDataLoader(StreamDataset([1, 0, 0, 0, 0], range, 1, "cycle", **options))
    assert {int(batch.source_index) for batch in itertools.islice(loader, 60)} == {0}


def test_without_determinism_a_state_may_give_back_many_empty_sources_and_that_is_no_error():
    def build():
        return make_loader([0, 5, 0], range, 4, "cycle", time_steps=1, lookahead=2, deterministic=False)

    for step in range(1, 6):
        state = list(itertools.islice(build(), step))[-1].state_dict()
        loader = build()
        loader.load_state_dict(state)
        assert [batch.batch_index for batch in itertools.islice(loader, 9)] == list(range(step, step + 9))


def test_stop_iteration_in_collate_fn_does_not_end_the_epoch():
    with pytest.raises(RuntimeError, match="collate_fn raised StopIteration"):
        list(StreamDataLoader(StreamDataset([3], range, 1, time_steps=1), collate_fn=lambda _: next(iter(()))))


def test_errors_survive_pickling_and_take_a_message_alone():
    error = errors.OpenError("no", source_index=3, source="'x'", position=2, lane=1, worker_id=0)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.source_index, copy.lane) == (errors.OpenError, "no", 3, 1)
    assert issubclass(errors.WorkerTimeoutError, TimeoutError)
    for kind in (errors.OpenError, errors.ReadError, errors.LengthError, errors.EmptySourcesError):
        assert issubclass(kind, errors.StreamDataLoaderError)
        assert str(kind("message")) == "message"


def test_a_source_whose_repr_is_long_is_still_named():
    with pytest.raises(errors.OpenError, match="'xxx") as caught:
        list(make_loader(["x" * 10_000] * 2, no_such_clip, 2, time_steps=1))
    assert len(str(caught.value)) < 500


def test_a_source_whose_repr_has_lines_is_named_in_one():
    sources = [np.zeros((3, 2)), np.ones((3, 4))]
    with pytest.raises(errors.ItemError, match="make all streams alike") as caught:
        list(make_loader(sources, iter, 2, time_steps=1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("lengths", [[0, 2], [1, 4, 0]], ids=str)
def test_a_skipped_item_that_fits_no_dtype_leaves_others_alone(workers, lengths):
    def read(source):
        if lengths[source] == 0:
            yield 1 << 70
        yield from (source + 1 + i / 10 for i in range(lengths[source]))

    dataset = StreamDataset(range(len(lengths)), read, 2, time_steps=2, on_error="skip", lookahead=0)
    with pytest.warns(RuntimeWarning, match="does not fit its dtype"):
        batches = list(StreamDataLoader(dataset, workers))
    read_values = sorted(float(v) for b in batches for v in b.data[b.mask])
    assert read_values == sorted(s + 1 + i / 10 for s, n in enumerate(lengths) for i in range(n))


class Nested:
    """Streams of which the last one's items are nested 300 deep; they can begin anywhere."""

    def __init__(self, wrap):
        self._wrap = wrap

    def __call__(self, source, *, start=0):
        for i in range(start, 2):
            item = self._wrap(i)
            for _ in range(300 if source == 2 else 0):
                item = self._wrap(item)
            yield item


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("wrap", [lambda item: {"a": item}, lambda item: (item,)], ids=["dict", "tuple"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_items_that_are_nested_too_deeply_are_an_error_of_their_stream(wrap, batch_size):
    loader = make_loader([0, 1, 2], Nested(wrap), batch_size, time_steps=2, on_error="skip")
    assert sum(int(batch.mask.sum()) for batch in loader) == 4
    assert [failure.source_index for failure in loader.failures] == [2]
    with pytest.raises(errors.StreamError, match="nested more than 64 deep"):
        list(make_loader([0, 1, 2], Nested(wrap), batch_size, time_steps=2))


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "worker_method": "thread"}])
def test_streams_that_are_skipped_in_one_step_are_told_by_lane(options):
    broken = acting({(0, 2): raising(OSError), (1, 0): raising(OSError)})
    loader = make_loader(range(6), broken, 4, time_steps=3, on_error="skip", **options)
    list(loader)
    assert [failure.source_index for failure in loader.failures] == [0, 1]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("fault", [1, 2, 3])
def test_of_a_fault_and_misfits_the_lowest_lanes_is_raised(fault, workers):
    def open_stream(n):
        if n == 4 + fault:
            raise OSError("broken")
        yield np.zeros(3 if n > 4 else 2)  # in the second step, lane 0 alone is like the first step's

    batches = iter(make_loader(range(8), open_stream, 4, time_steps=1, num_workers=workers))
    next(batches)
    with pytest.raises(errors.ReadError if fault == 1 else errors.ItemError) as raised:
        list(batches)
    assert (raised.value.lane, raised.value.source_index) == (1, 5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_lane_whose_stream_broke_is_not_idle(workers):
    def broken(source):
        yield from range(2)
        if source:
            raise OSError("lost")
        yield from range(2)

    loader = StreamDataLoader(StreamDataset([0, 1], broken, 2, "drop", time_steps=2), workers)
    with pytest.raises(errors.ReadError, match="lost"):
        list(loader)


def test_a_line_of_an_error_is_not_of_megabytes():
    found = str(errors.StoreError(f"first\na.json has version {'9' * 10**6}, and must have 1"))
    assert len(found) < 13_000
    assert found.startswith("first\na.json has version 999")
    assert found.endswith("must have 1")
    assert len(str(errors.StoreError("\n".join(["line"] * 10**5)))) == 5 * 10**5 - 1


class Once:
    """Returns what it is given, but raises at its n-th call."""

    def __init__(self, call, error):
        self.left, self.error = call, error

    def __call__(self, what):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return what


def test_an_iterator_is_not_copied_and_a_device_that_is_not_there_is_named():
    loader = StreamDataLoader(StreamDataset([3], range, 1, time_steps=2))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        for batches in (iter(loader), loader.parts()):
            with pytest.raises(TypeError, match="cannot be copied or pickled; copy the StreamDataLoader"):
                copied(batches)
    number = torch.cuda.device_count()
    with pytest.raises(
        RuntimeError, match=rf"device is 'cuda:{number}', which torch .* cannot use here: .*leave device"
    ):
        next(iter(loader.to(f"cuda:{number}")))


def _beside(dataset, num_workers, collate_fn):
    return side_by_side([(dataset, 2)], num_workers, collate_fn=collate_fn)


@pytest.mark.parametrize("loader_of", [StreamDataLoader, _beside], ids=["alone", "side_by_side"])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", ["collate_fn", "stream", "parts"])
def test_a_loop_that_goes_on_after_an_error_is_told_and_a_state_counts_what_was_delivered(place, error, loader_of):
    """A loop that catches it would take the part of the epoch that it got for the whole."""

    def build(fails):
        of_items, of_batches = Once(9, error), Once(3, error)
        act = of_items if fails and place != "collate_fn" else lambda item: item
        dataset = StreamDataset([8, 6, 5], lambda n: map(act, range(n)), 2, time_steps=2, seed=0)
        collate = of_batches if fails and place == "collate_fn" else lambda windows: windows
        return loader_of(dataset, 0, lambda windows: [window.tolist() for window in collate(windows)])

    whole = list(build(fails=False))
    loader = build(fails=True)
    batches, got = iter(loader), []
    if place == "parts":
        batches = map(methodcaller("tolist"), map(attrgetter("data.T"), loader.parts()))
    with pytest.raises((ValueError, KeyboardInterrupt, errors.ReadError)):
        got.extend(batches)  # keeps the batches before the error
    assert got == whole[:2]
    for _ in range(2):
        with pytest.raises(
            errors.IteratorError, match="ended this iterator after 2 batches, before its epoch was over"
        ):
            next(batches)
    loader.load_state_dict(loader.state_dict())
    assert got + list(loader) == whole


@pytest.mark.parametrize("loader_of", [StreamDataLoader, lambda *given: _beside(*given, None)], ids=["alone", "beside"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_whose_part_cannot_be_moved_is_not_counted_as_delivered(workers, loader_of):
    class Moving:
        def to(self, device):
            return act(self)

    act = Once(4, MemoryError("no room"))  # within the second step
    loader = loader_of(StreamDataset([4] * 4, lambda n: (Moving() for _ in range(n)), 2, time_steps=1), workers)
    parts, got = loader.to("cpu").parts(), []
    with pytest.raises(MemoryError):
        got.extend(parts)
    assert {part.batch_index for part in got[: 1 + (workers > 0)]} == {0}  # a part of each worker
    with pytest.raises(errors.IteratorError, match="after 1 batches"):
        next(parts)
    loader.load_state_dict(loader.state_dict())
    assert [batch.batch_index for batch in loader] == [1, 2, 3, 4, 5, 6, 7]


def _torchs(dataset, workers):
    return DataLoader(dataset, batch_size=None, num_workers=workers)


READ = {
    "with a bar": lambda dataset, workers: StreamDataLoader(dataset, workers).progress(disable=True),
    "by torch": _torchs,
    "regrouped": lambda dataset, workers: regroup(_torchs(dataset, workers)),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("workers", [0, 2])
def test_no_other_iterator_seems_to_have_ended_after_an_error_either(workers, read, monkeypatch):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread would stay
    dataset = StreamDataset([9, 9], lambda n: map((5).__floordiv__, range(n - 5, -1, -1)), 2, time_steps=1)
    batches = iter(READ[read](dataset, workers))
    kinds = []
    for _ in range(14):
        try:
            next(batches)
        except Exception as error:
            kinds.append(type(error))
    assert kinds[0] is errors.ReadError  # of each of torch's workers
    assert kinds[-1] is errors.IteratorError
    assert not set(kinds) - {errors.ReadError, errors.IteratorError}
