"""Bad input: what the user sees. Nothing hangs, nothing is lost in silence."""

import itertools
import pickle
import traceback

import numpy as np
import pytest

from stream_dataloader import (
    EmptySourcesError,
    LengthError,
    OpenError,
    ReadError,
    StreamDataLoader,
    StreamDataLoaderError,
    StreamDataset,
    StreamError,
    WorkerTimeoutError,
)

THREAD = {"num_workers": 1, "worker_method": "thread"}
WRONG_OPTIONS = [
    ({"sources": []}, ValueError, "sources is empty; pass at least one"),
    ({"sources": "clip.mp4"}, TypeError, r"is one str; pass \[source\]"),
    ({"sources": None}, TypeError, "sources must be a list of sources, and is None"),
    ({"sources": {"a", "b"}}, TypeError, "sources is a set, and must have an order"),
    ({"sources": {"a": 1}}, TypeError, r"sources is a dict, .*sources.items\(\)"),
    ({"sources": [1, (i for i in ())]}, TypeError, "source 1 .*generator.*cannot be pickled"),
    ({"open_stream": 3}, TypeError, "open_stream must be callable, and is 3, a int"),
    ({"batch_size": 0}, ValueError, "batch_size is 0, and must be at least 1"),
    ({"padding_mode": "none"}, ValueError, "padding_mode is 'none', and must be one of 'zeros', 'data', 'drop', 'c"),
    ({"windows": "packed", "time_steps": None}, ValueError, 'windows="packed" needs time_steps='),
    ({"time_steps": 0}, ValueError, "time_steps is 0, and must be at least 1"),
    ({"lookahead": -1}, ValueError, "lookahead is -1, and must be at least 0"),
    ({"schedule": "balanced"}, ValueError, "schedule='balanced' needs lengths="),
    ({"lengths": [1]}, ValueError, "lengths must be 3 integers"),
    ({"lengths": [1, 2, -3]}, ValueError, r"lengths\[2\] is -3, and must be at least 0"),
    ({"seed": -1}, ValueError, "seed is -1, and must be at least 0"),
    ({"on_error": "ignore"}, ValueError, "on_error is 'ignore', and must be one of 'raise', 'skip'"),
    ({"shuffle": "False"}, TypeError, "shuffle must be True or False, and is 'False', a str"),
    ({"lookahead": 10**6}, ValueError, "lookahead is 1000000, and must be at most 1024"),
    ({"lengths": np.array([1, 2, 2**63], np.uint64)}, ValueError, r"lengths\[2\] is 9223372036854775808, and must"),
    ({"fingerprint": 5}, TypeError, "fingerprint must be a string, and is 5, a int"),
    ({"windows": np.array(["packed", "aligned"])}, ValueError, "windows is array.* must be one of 'aligned', 'packed'"),
    ({"padding_mode": "drop", "batch_size": 4}, ValueError, "lower batch_size to at most 3"),
]


@pytest.mark.parametrize(("options", "kind", "reason"), WRONG_OPTIONS)
def test_a_wrong_option_of_the_dataset_is_an_error_where_it_is_built(options, kind, reason):
    given = {"sources": [1, 2, 3], "open_stream": range, "batch_size": 2, "time_steps": 2} | options
    with pytest.raises(kind, match=reason):
        StreamDataset(**given)


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"num_workers": -1}, ValueError, "num_workers is -1"),
        ({"collate_fn": 3}, TypeError, "collate_fn must be callable"),
        ({"dataset": [1, 2]}, TypeError, r"must be a StreamDataset, and is a list; .*StreamDataset\(sources, "),
        ({"prefetch_factor": 2}, ValueError, "prefetch_factor"),
        ({"num_workers": 1, "prefetch_factor": 0}, ValueError, "prefetch_factor is 0, and must be at least 1"),
        ({"num_workers": 1, "worker_init_fn": 3}, TypeError, "worker_init_fn must be callable"),
        ({"persistent_workers": True}, ValueError, "persistent_workers"),
        ({"timeout": -1}, ValueError, "timeout is -1 seconds, and must be from 0 to 1e"),
        ({"timeout": "5"}, TypeError, "timeout must be a number of seconds, and is '5', a str"),
        ({"pin_memory": "False"}, TypeError, "pin_memory must be True or False, and is 'False'"),
        ({"num_workers": 1, "persistent_workers": "no"}, TypeError, "persistent_workers must be True or False"),
        ({"num_workers": 1, "multiprocessing_context": 5}, TypeError, "multiprocessing_context is 5, and must be"),
        ({"device": "cudaa"}, ValueError, "device is 'cudaa', which torch does not know"),
        ({"device": 1.5}, TypeError, "device must be a torch.device, a name or a number, and is 1.5, a float"),
        ({"transport": None}, ValueError, "transport is None, and must be one of 'auto'"),
        ({"num_workers": 1, "threads_per_worker": 0}, ValueError, "threads_per_worker is 0, and must be at least 1"),
        ({"num_workers": 0, "threads_per_worker": 2}, ValueError, "num_workers is 0, .* pass num_workers=1"),
        ({**THREAD, "threads_per_worker": 2}, ValueError, "num_workers counts them; leave threads_per_"),
        ({**THREAD, "max_restarts": 2}, ValueError, 'max_restarts is 2, and worker_method="thread" has no workers'),
        ({**THREAD, "multiprocessing_context": "fork"}, ValueError, "'fork', and worker_method=.* no process"),
        ({**THREAD, "transport": "queue"}, ValueError, 'transport is "queue", which is a way between processes'),
        ({"num_workers": 1, "worker_method": "threads"}, ValueError, "must be one of 'process', 'thread'"),
    ],
)
def test_a_wrong_option_of_the_loader_is_an_error_where_it_is_built(options, kind, reason):
    given = {"dataset": StreamDataset([1], range, 1, time_steps=1)} | options
    with pytest.raises(kind, match=reason):
        StreamDataLoader(**given)


def test_more_workers_than_lanes_are_as_many_as_lanes_with_one_warning():
    dataset = StreamDataset([3, 3], range, 2, time_steps=2)
    with pytest.warns(UserWarning, match="2 workers are used; raise batch_size") as caught:
        loader = StreamDataLoader(dataset, 4)
    assert len([w for w in caught if "num_workers is 4" in str(w.message)]) == 1
    assert loader.num_workers == 2
    assert next(iter(loader)).worker_id.tolist() == [0, 1]


class BrokenIter:
    def __iter__(self):
        raise OSError("disk gone")


class Broken:
    """Source 2 is broken in one of several ways; the others yield four items."""

    def __init__(self, how):
        self.how = how

    def __call__(self, source):
        if source == 2 and self.how == "raises":
            raise FileNotFoundError("no such clip")
        if source == 2 and self.how == "no iterable":
            return 5
        if source == 2 and self.how == "iter raises":
            return BrokenIter()
        return self.read(source)

    def read(self, source):
        for i in range(4):
            if source == 2 and self.how == "midway" and i == 3:
                raise OSError("disk gone")
            if source == 2 and self.how == "first" and i == 0:
                raise OSError("disk gone")
            yield np.array([source, i])


PLACES = [
    ("raises", OpenError, 0, "open_stream raised FileNotFoundError", FileNotFoundError),
    ("no iterable", OpenError, 0, "which is no iterable", TypeError),
    ("iter raises", OpenError, 0, "whose iter.. raised OSError", OSError),
    ("first", ReadError, 0, "the stream raised OSError", OSError),
    ("midway", ReadError, 3, "the stream raised OSError", OSError),
]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("how", "kind", "position", "reason", "cause"), PLACES)
def test_a_broken_stream_raises_at_its_own_step_and_says_where(how, kind, position, reason, cause, workers, early):
    dataset = StreamDataset(range(4), Broken(how), 2, time_steps=2, lookahead=int(early), open_early=early)
    batches = []
    with pytest.raises(kind, match=reason) as caught:
        batches.extend(iter(StreamDataLoader(dataset, workers)))
    error = caught.value
    assert isinstance(error, StreamError)
    assert (error.source_index, error.source, error.position, error.lane) == (2, "2", position, 0)
    assert error.worker_id == 0
    assert f"source 2 (2), item {position}, lane 0, worker 0" in str(error)
    assert len(batches) == 2 + position // 2
    assert isinstance(error.__cause__, cause)
    if cause is not TypeError:
        text = "".join(traceback.format_exception(error))
        assert "in read" in text or "in __" in text, "the original traceback is kept"


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_of_several_broken_streams_the_first_in_order_of_step_and_lane_raises(workers):
    def read(source):
        for i in range(6):
            if i == [9, 5, 3, 3][source]:
                raise ValueError(f"source {source}")
            yield i

    with pytest.raises(ReadError) as caught:
        list(StreamDataLoader(StreamDataset(range(4), read, 4, time_steps=2), workers))
    assert (caught.value.source_index, caught.value.position) == (2, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_leaves_the_rest_of_the_window_and_goes_on(workers):
    dataset = StreamDataset(range(4), Broken("midway"), 2, time_steps=2, on_error="skip", lookahead=0)
    loader = StreamDataLoader(dataset, workers)
    with pytest.warns(RuntimeWarning, match=r"skipped the rest of a stream: source 2 \(2\), item 3"):
        batches = list(loader)
    read = {(int(s), int(p)) for b in batches for s, p in zip(b.source[b.mask], b.position[b.mask], strict=True)}
    assert read == {(s, p) for s in range(4) for p in range(4)} - {(2, 3)}
    assert [(f.source_index, f.position) for f in loader.failures] == [(2, 3)]
    assert batches[3].mask.T.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_a_source_that_does_not_open_starts_the_next_in_the_same_window(workers):
    dataset = StreamDataset(range(6), Broken("raises"), 2, time_steps=4, on_error="skip")
    loader = StreamDataLoader(dataset, workers)
    with pytest.warns(RuntimeWarning, match="FileNotFoundError"):
        batches = list(loader)
    assert [b.source[0].tolist() for b in batches] == [[0, 3], [1, 4], [5, -1]]
    assert all(b.mask[:, b.source[0] >= 0].all() for b in batches)


def test_a_policy_decides_per_error():
    seen = []

    def policy(error):
        seen.append(type(error))
        return "skip" if isinstance(error, OpenError) else "raise"

    with pytest.warns(RuntimeWarning):
        list(StreamDataLoader(StreamDataset(range(4), Broken("raises"), 2, time_steps=2, on_error=policy)))
    with pytest.raises(ReadError):
        list(StreamDataLoader(StreamDataset(range(4), Broken("midway"), 2, time_steps=2, on_error=policy)))
    assert seen == [OpenError, ReadError]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("promised", "reason"), [(3, "at least 4 items, and lengths.1. is 3"), (5, "only 4 items")])
def test_wrong_lengths_are_an_error(promised, reason, workers):
    dataset = StreamDataset([4, 4], range, 2, time_steps=2, lengths=[4, promised])
    with pytest.raises(LengthError, match=reason):
        list(StreamDataLoader(dataset, workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("padding_mode", ["zeros", "data", "drop"])
def test_an_epoch_without_any_item_is_empty(padding_mode, workers):
    assert not list(StreamDataLoader(StreamDataset([0] * 5, range, 3, padding_mode, time_steps=2), workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cycle_without_any_item_is_an_error(workers):
    with pytest.raises(EmptySourcesError):
        next(iter(StreamDataLoader(StreamDataset([0] * 5, range, 3, "cycle", time_steps=2), workers)))


def test_without_determinism_a_state_may_give_back_many_empty_sources_and_that_is_no_error():
    def build():
        dataset = StreamDataset([0, 5, 0], range, 4, "cycle", time_steps=1, lookahead=2, deterministic=False)
        return StreamDataLoader(dataset)

    for step in range(1, 6):
        state = list(itertools.islice(build(), step))[-1].state_dict()
        loader = build()
        loader.load_state_dict(state)
        assert [batch.step for batch in itertools.islice(loader, 9)] == list(range(step, step + 9))


@pytest.mark.parametrize("workers", [0, 2])
def test_sys_exit_in_a_stream_does_not_hang(workers):
    def leave(source):
        raise SystemExit(3)

    with pytest.raises((SystemExit, RuntimeError)):
        list(StreamDataLoader(StreamDataset([1, 2, 3], leave, 2, time_steps=1, lookahead=1, open_early=True), workers))


def test_stop_iteration_in_collate_fn_does_not_end_the_epoch():
    with pytest.raises(RuntimeError, match="collate_fn raised StopIteration"):
        list(StreamDataLoader(StreamDataset([3], range, 1, time_steps=1), collate_fn=lambda _: next(iter(()))))


def test_errors_survive_pickling_and_take_a_message_alone():
    error = OpenError("no", source_index=3, source="'x'", position=2, lane=1, worker_id=0)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.source_index, copy.lane) == (OpenError, "no", 3, 1)
    assert issubclass(WorkerTimeoutError, TimeoutError)
    for kind in (OpenError, ReadError, LengthError, EmptySourcesError):
        assert issubclass(kind, StreamDataLoaderError)
        assert str(kind("message")) == "message"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_whose_repr_is_broken_or_long_is_still_named(workers):
    def raising(source):
        raise OSError

    with pytest.raises(OpenError) as caught:
        list(StreamDataLoader(StreamDataset(["x" * 10_000] * 2, raising, 2, time_steps=1), workers))
    assert len(str(caught.value)) < 500


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
