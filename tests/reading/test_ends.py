"""`mark_ends`: streams' last steps are marked, and nothing else in the batches changes."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from cases import Case
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from kinds_of_loaders import Counted
from worker_streams import Writing, acting, kill_self

from stream_dataloader import StreamDataLoader, StreamDataset, StreamError, interleave
from stream_dataloader.errors import ItemError, LengthError, ReadError
from stream_dataloader.testing import check_resume
from stream_dataloader.testing.resume import batch_key

CASE = Case([4, 0, 9, 2, 2, 7, 1, 3, 5, 8, 6], 4, 3, shuffle=True, seed=1)


def marked(batches):
    cells = [torch.stack([batch.source_index, batch.position], -1)[batch.is_last] for batch in batches]
    return sorted(torch.cat(cells).tolist())


def check_marks(batches, lengths):
    for batch in batches:
        ends = [[source >= 0 and lengths[source] - 1 for source in row] for row in batch.source_index.tolist()]
        assert torch.equal(batch.is_last, (batch.source_index >= 0) & (batch.position == torch.tensor(ends)))


def until_error(loader):
    batches, error = [], None
    try:
        batches.extend(loader)
    except StreamError as raised:
        error = raised
    return batches, error


def with_marks(build, workers=0, **options):
    """A dataset's batches with marks, up to an error: all else, and the error, are as without."""
    (found, error), (expected, plain) = (
        until_error(StreamDataLoader(build(mark_ends=mark_ends), workers, **options)) for mark_ends in (True, False)
    )
    assert (type(error), str(error)) == (type(plain), str(plain))
    without = [dataclasses.replace(batch, is_last=None) for batch in found]
    assert list(map(batch_key, without)) == list(map(batch_key, expected))
    return found, error


class Windows:
    """Streams that cut windows, of which any may have no steps; of which kind depends on the source's list."""

    def __call__(self, source):
        index, cuts = source
        begin = 0
        for steps in cuts:
            positions = np.arange(begin, begin + steps)
            yield {"n": 1000 * index + positions, "name": [str(p) for p in positions], "index": index}
            begin += steps


@random_cases(120)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8),
    st.integers(1, 3),
    st.sampled_from(["zeros", "data"]),
    st.booleans(),
)
def test_windows_that_streams_cut_are_marked_at_their_last_step(cuts, lanes, padding_mode, known):
    options = {"seed": 0, "windows": "given", "lengths": [len(one) for one in cuts] if known else None}
    build = functools.partial(StreamDataset, list(enumerate(cuts)), Windows(), lanes, padding_mode, **options)
    check_marks(with_marks(build)[0], [sum(one) for one in cuts])


def test_a_mix_marks_ends_if_its_datasets_do():
    def mix(*marks, **options):
        lengths = itertools.cycle([[3, 1], None])
        datasets = [StreamDataset([3, 1], range, 2, time_steps=2, lengths=next(lengths), mark_ends=m) for m in marks]
        return interleave(datasets, seed=0, **options)

    assert (marked(StreamDataLoader(mix(True, True)))) == [[0, 2], [1, 0], [2, 2], [3, 0]]
    assert len(marked(StreamDataLoader(mix(True, False, mark_ends=True)))) == 4
    with pytest.raises(ValueError, match="mark_ends=True"):
        mix(True, False)
    with pytest.raises((TypeError, ValueError), match="mark_ends must be"):
        StreamDataset([1], range, 1, mark_ends="yes")
    assert len(marked(StreamDataLoader(mix(True, None)))) == len(marked(StreamDataLoader(mix(None, True)))) == 4
    assert next(iter(StreamDataLoader(mix(None, None)))).is_last is None  # the second's lengths are not known
    assert next(iter(StreamDataLoader(mix(None, False)))).is_last is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("windows", ["aligned", "packed"])
def test_ends_are_marked_where_lengths_are_known_if_nothing_is_said(windows, workers):
    options = {"time_steps": 3, "windows": windows, "shuffle": True, "seed": 0}
    build = functools.partial(StreamDataset, range(len(CASE.lengths)), CountedItems(), 4, **options)
    check_marks(with_marks(functools.partial(build, lengths=CASE.lengths), workers)[0], CASE.lengths)
    said, unsaid, unknown, off = (
        list(StreamDataLoader(build(**given), workers))
        for given in (
            {"lengths": CASE.lengths, "mark_ends": True},
            {"lengths": CASE.lengths},
            {},
            {"lengths": CASE.lengths, "mark_ends": False},
        )
    )
    assert list(map(batch_key, unsaid)) == list(map(batch_key, said))
    assert marked(unsaid) == [[source, length - 1] for source, length in enumerate(CASE.lengths) if length]
    assert [batch.is_last for batch in unknown + off] == [None] * len(unknown + off)


class CountedItems:
    def __call__(self, source):
        return iter(np.arange(CASE.lengths[source]))


def test_windows_that_streams_cut_are_read_ahead_only_if_it_is_said():
    sources = [(0, [2, 1]), (1, [3])]
    dataset = StreamDataset(sources, Windows(), 2, windows="given", lengths=[2, 1])
    assert next(iter(StreamDataLoader(dataset))).is_last is None


@pytest.mark.parametrize(
    ("options", "collate_fn", "expected"),
    [
        ({}, None, [2, 4, 5]),
        ({"mark_ends": True}, None, [3, 5, 5]),
        ({"mark_ends": True, "lengths": [5]}, None, [2, 4, 5]),
        ({"lengths": [5]}, None, [2, 4, 5]),
        ({"mark_ends": True}, list, [2, 4, 5]),
    ],
)
def test_one_item_is_taken_ahead_if_no_length_is_known(options, collate_fn, expected):
    pulls = []

    def read(length):
        for position in range(length):
            pulls.append(position)
            yield np.arange(position, position + 2)

    loader = StreamDataLoader(StreamDataset([5], read, 1, time_steps=2, **options), collate_fn=collate_fn)
    assert [len(pulls) for _ in loader] == expected


@dataclasses.dataclass
class Pair:
    one: object
    two: object


def kinds_of(scratch, index, position):
    """Items of each kind, in memory that all streams share."""
    scratch[:] = 100 * index + position
    as_tensor = torch.from_numpy(scratch)
    return {
        "array": scratch,
        "tensor": as_tensor,
        "dict": {"b": scratch, "a": as_tensor.view(4, 1, 2), "name": f"{index}/{position}"},
        "pair": Pair(scratch, (position, 1.5 * index)),
        "scalar": scratch[0, 0],
        "bits": as_tensor.view(torch.bfloat16),
        "bytes swapped": scratch.view(">i4"),
        "masked": {"n": np.ma.masked_equal(scratch.copy(), 0), "x": scratch},
    }


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("kind", kinds_of(np.zeros((4, 2), np.int32), 0, 0))
def test_streams_may_share_a_buffer(kind, windowed):
    scratch = np.zeros((4, 2), np.int32)

    def read(source):
        index, length = source
        for position in range(length):
            yield kinds_of(scratch, index, position)[kind]

    if windowed and kind == "scalar":
        return  # has no time axis
    sources = list(enumerate([3, 4, 1, 2, 6]))
    options = {"windows": "given"} if windowed else {"time_steps": 2}
    found, _ = with_marks(functools.partial(StreamDataset, sources, read, 2, **options))
    assert sum(int(batch.is_last.sum()) for batch in found) == 5


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_a_stream_that_writes_and_raised_once_is_not_read_on():
    write = functools.partial(Writing, broken=4)
    found, _ = with_marks(functools.partial(StreamDataset, [7, 3], write, 1, time_steps=2, on_error="skip"))
    assert marked(found) == [[1, 2]]


def breaking(text):
    """Its characters; `!` is where it breaks, `?` an item of another kind."""
    for character in text:
        if character == "!":
            raise OSError("unplugged")
        yield character if character == "?" else ord(character)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("texts", [["ab!", "cdefgh"], ["abcdef", "ab", "ab?"], ["abcdef", "!"], ["ab", "cd!f"]])
def test_an_error_comes_at_its_own_item(texts, workers):
    _, error = with_marks(functools.partial(StreamDataset, texts, breaking, 2, time_steps=2, seed=0), workers)
    assert isinstance(error, (ReadError, ItemError))


@pytest.mark.filterwarnings("ignore:skipped the rest")
@pytest.mark.parametrize("windows", ["aligned", "packed"])
@pytest.mark.parametrize("time_steps", [1, 2, 3, 4])
def test_a_stream_that_breaks_has_no_last_step(windows, time_steps):
    texts, asked = ["abc!", "de", "!", "fghi", "jkl?m", "n"], []

    def skip(error):
        asked.append((error.source_index, error.position))
        return "skip"

    options = {"time_steps": time_steps, "windows": windows, "on_error": skip, "lookahead": 0}
    found, _ = with_marks(functools.partial(StreamDataset, texts, breaking, 2, **options))
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :], "the policy is asked once, where the item is"
    assert (marked(found)) == [[1, 1], [3, 3], [5, 0]]


@pytest.mark.filterwarnings("ignore:skipped the rest")
@pytest.mark.parametrize("time_steps", [1, 2, 3])
@pytest.mark.parametrize(("promised", "last"), [(2, [[0, 1]]), (4, [])])
def test_a_wrong_length_is_an_error_at_its_place(time_steps, promised, last):
    build = functools.partial(StreamDataset, [3, 5], range, 1, time_steps=time_steps, lengths=[promised, 5])
    assert isinstance(with_marks(build)[1], LengthError)
    found, _ = with_marks(functools.partial(build, on_error="skip"))
    assert marked(found) == [*last, [1, 4]]


class Dropping:
    """A stream that drops once at item 4, and goes on by what it is given."""

    def __init__(self, way):
        self.way, self.opened = way, 0

    def __call__(self, length, start=0):
        self.opened += 1
        broken = 4 if self.opened == 1 else None
        if self.way == "writes" and start == 0:
            return Writing(length, broken=broken)
        return self.items(length, start, broken)

    def items(self, length, start, broken):
        for position in range(start, length):
            if position == broken:
                raise OSError("dropped")
            yield {"x": torch.full((3,), position, dtype=torch.int32), "y": position}


@pytest.mark.parametrize("way", ["iterates", "writes"])
@pytest.mark.parametrize("length", [6, 4])
def test_a_stream_that_broke_ahead_is_opened_again_there(way, length, monkeypatch):
    monkeypatch.setattr("stream_dataloader._engine.reading.stream.time.sleep", lambda _: None)
    dataset = StreamDataset([length], Dropping(way), 1, time_steps=2, retries=1, mark_ends=True)
    batches = list(StreamDataLoader(dataset))
    assert [y for batch in batches for y in batch.data["y"][:, 0].tolist()] == list(range(length))
    assert marked(batches) == [[0, length - 1]]


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_a_source_that_kills_its_worker_is_skipped_at_the_same_item():
    read = acting({(3, 4): kill_self}, 6)
    build = functools.partial(StreamDataset, range(6), read, 4, time_steps=2, on_error="skip")
    found, _ = with_marks(build, 2, max_restarts=4)
    assert marked(found) == [[source, 5] for source in (0, 1, 2, 4, 5)]


def opens_anywhere(length, start=0):
    return (np.array([length, position]) for position in range(start, length))


LENGTHS = [4, 0, 9, 2, 7, 1, 3, 6]
CUTS = [(i, [2] * (n // 2) + [0] * (i % 2) + [n % 2]) for i, n in enumerate(LENGTHS)]
#: Sources, what opens them, and options.
KINDS = {
    "own state": (LENGTHS, Counted, {}),
    "windows": (CUTS, Windows(), {"time_steps": None, "windows": "given"}),
    "skipping": (["abcd", "ab!", "abc!d", "!", "", "abcdefg", "ab"], breaking, {"on_error": "skip"}),
}


@pytest.mark.filterwarnings("ignore:skipped the rest")
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_resumes_with_any_number_of_workers(kind):
    sources, open_stream, options = KINDS[kind]

    def loader(workers):
        given = {"time_steps": 2, "seed": 0, "shuffle": True, "mark_ends": True} | options
        return StreamDataLoader(StreamDataset(sources, open_stream, 3, **given), workers)

    check_resume(loader, num_workers=(0, 2) if kind == "windows" else (0,), epochs=1)


@pytest.mark.parametrize("open_stream", [Counted, opens_anywhere])
def test_a_state_is_the_same_with_marks_and_without(open_stream):
    def loader(mark_ends):
        return StreamDataLoader(StreamDataset([5, 3, 4], open_stream, 2, time_steps=2, seed=0, mark_ends=mark_ends))

    found = {mark_ends: list(loader(mark_ends)) for mark_ends in (True, False)}
    for step, (batch, other) in enumerate(zip(*found.values(), strict=True)):
        assert batch.state_dict() == other.state_dict()
        for mark_ends, saved in ((True, other), (False, batch)):  # what was saved with the one loads with the other
            resumed = loader(mark_ends)
            resumed.load_state_dict(saved.state_dict())
            assert list(map(batch_key, resumed)) == list(map(batch_key, found[mark_ends][step + 1 :]))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_had_is_an_error_of_the_same_batch(workers):
    class Stateless(Counted):
        def state_dict(self):
            raise OSError("locked")

    batches, error = with_marks(functools.partial(StreamDataset, [5], Stateless, 1, time_steps=2), workers)
    assert not batches
    assert error.position == 2


def test_the_field_goes_wherever_a_batch_goes():
    batch = next(iter(StreamDataLoader(StreamDataset([2, 3], range, 2, time_steps=2, mark_ends=True))))
    assert batch.is_last.dtype == torch.bool
    assert batch.is_last.tolist() == [[False, False], [True, False]]
    assert batch.to(torch.bfloat16).is_last.dtype == torch.bool
    with pytest.raises(ValueError, match=r"is_last must have mask's shape"):
        dataclasses.replace(batch, is_last=torch.zeros(3, dtype=torch.bool))
    batch.is_last[:] = True  # a user's own memory
    assert batch.to("meta").is_last.device.type == "meta"
