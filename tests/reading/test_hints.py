"""What users of other libraries try is told the name that it has here."""

import importlib
from collections.abc import Iterable

import numpy as np
import pytest

import stream_dataloader
from stream_dataloader import (
    LaneBatchSampler,
    StreamDataLoader,
    StreamDataset,
    errors,
    interleave,
    recurrent,
    stores,
    streams,
    testing,
)
from stream_dataloader._engine.hints import _ROOMS
from stream_dataloader.errors import ItemError
from stream_dataloader.recurrent import LaneCache, RecurrentState
from stream_dataloader.streams import ArrayStream, TextStream, VideoStream

DATASET = StreamDataset([3], range, 1, time_steps=1)


@pytest.mark.parametrize(
    ("build", "hint"),
    [
        (lambda: StreamDataset([3], range, seq_len=4), r"'seq_len'; time_steps= of StreamDataset"),
        (lambda: StreamDataset([3], range, num_lanes=4), r"'num_lanes'; batch_size= of StreamDataset"),
        (lambda: StreamDataset([3], range, 1, transform=abs), r"'transform'; have open_stream apply it"),
        (lambda: StreamDataset([3], range, 1, drop_last=True), r'padding_mode="drop"'),
        (lambda: StreamDataset([3], range, 1, timesteps=3), r"did you mean time_steps=\?"),
        (lambda: StreamDataset([3], streamer=range, batch_size=1), r"open_stream="),
        (lambda: StreamDataset([3], range, 1, zebra=3), r"'zebra'$"),
        (lambda: StreamDataset([3], range, 1, sequence_length=3), r"time_steps= of StreamDataset"),
        (lambda: StreamDataset([3], range, 1, num_workers=3), r"num_workers= of StreamDataLoader"),
        (lambda: LaneBatchSampler(2, lengths=[3], seq_len=3), r"'seq_len'; time_steps="),
        (lambda: LaneBatchSampler(2, group=[3]), r"did you mean groups=\?"),
        (lambda: StreamDataLoader(DATASET, seq_len=3), r"no option seq_len; time_steps= of StreamDataset"),
        (lambda: StreamDataLoader(DATASET, prefetch=3), r"no option prefetch; prefetch_factor="),
        (lambda: StreamDataLoader(DATASET, pin_memry=True), r"did you mean pin_memory=\?"),
        (lambda: StreamDataLoader(DATASET, zebra=True), r"no option zebra$"),
        (lambda: StreamDataLoader(DATASET, shuffle=True), r"shuffle is the dataset's"),
        (lambda: ArrayStream(transform=abs), r"have open_stream apply it"),
        (lambda: TextStream(tokeniser=list), r"did you mean tokenizer=\?|did you mean tokens=\?"),
        (lambda: RecurrentState(batch_dims=1), r"did you mean batch_dim=\?"),
        (lambda: StreamDataset([3], range, 1, packed=True), r'windows="packed" of StreamDataset'),
        (lambda: StreamDataLoader(DATASET, packed=True), r'no option packed; windows="packed" of StreamDataset'),
        (lambda: StreamDataLoader(DATASET, misplace=True), r"no option misplace$"),
        (lambda: VideoStream(height=3), r"'height'; size=\(height, width\)"),
        (lambda: VideoStream(frame_rate=3), r"'frame_rate'; fps= of VideoStream"),
        (lambda: VideoStream(grayscale=True), r'color="gray" of VideoStream'),
        (lambda: TextStream(bytes=True), r'units="bytes" of TextStream'),
        (lambda: LaneCache(mem_len=3), r"'mem_len'; steps= of LaneCache"),
        (lambda: interleave([DATASET], weight=[1]), r"no option 'weight'; did you mean weights=\?"),
        (lambda: interleave([DATASET], seq_len=3), r"no option 'seq_len'; time_steps= of StreamDataset"),
        (lambda: testing.audit(DATASET, position="p"), r"did you mean positions=\?"),
        (lambda: streams.live(range, max_wait=1), r"did you mean max_wait_seconds=\?"),
    ],
)
def test_an_option_by_another_name_is_told_ours(build, hint):
    with pytest.raises(TypeError, match=hint) as raised:
        build()
    assert raised.value.__cause__ is None


def test_a_type_error_of_what_a_constructor_calls_stays_as_it_is():
    class Sources:
        def __iter__(self):
            return sorted([], seq_len=3)

    with pytest.raises(TypeError) as raised:
        StreamDataset(Sources(), range, 1)
    assert "time_steps" not in str(raised.value)


@pytest.mark.parametrize("room", _ROOMS)
def test_a_name_of_another_room_is_told_its_room(room):
    module = importlib.import_module(f"stream_dataloader.{room}")
    for name in _ROOMS[room]:
        with pytest.raises(ImportError, match=f"from stream_dataloader.{room} import {name}"):
            exec(f"from stream_dataloader import {name}", {})
        assert hasattr(module, name)
    assert not hasattr(stream_dataloader, "nothing")
    assert {*streams.__all__} == {*_ROOMS["streams"]}
    top = {*stream_dataloader.__all__}
    assert {*recurrent.__all__} - top == {*_ROOMS["recurrent"]}
    assert {*errors.__all__} - top == {*_ROOMS["errors"]}
    assert {*testing.__all__} == {*_ROOMS["testing"]}


ROOMS = """
import sys
import stream_dataloader as sd
print([room for room in sys.modules if room.startswith("stream_dataloader.") and room.split(".")[1] in sd._ROOMS])
print({*sd._ROOMS, *sd.__all__} <= {*dir(sd)}, sd.RecurrentState is sd.recurrent.RecurrentState)
print([getattr(sd, room).__name__.split(".")[1] == room for room in sd._ROOMS])
from stream_dataloader import *
print(RecurrentState is sd.RecurrentState)
"""


def test_rooms_are_there_without_an_import_of_their_own(programs):
    done = programs(ROOMS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "True True", str([True] * 6), "True"]
    assert {name for name in stores.__all__ if name.endswith(("Store", "Writer")) and name[0] != "S"} - {
        "OpenedStore"
    } == {*_ROOMS["stores"]}


def bare_next(count):
    numbers = iter(range(count))
    while True:
        yield next(numbers) + next(numbers)


def refuses(_):
    raise StopIteration


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("open_stream", [bare_next, refuses])
def test_a_bare_next_gets_a_hint(open_stream, workers):
    loader = StreamDataLoader(StreamDataset([4], open_stream, 1, time_steps=2), workers)
    with pytest.raises(
        stream_dataloader.StreamError, match=r"StopIteration.*; a next\(\) inside .* next\(iterator, None\)"
    ):
        list(loader)


def test_pictures_of_two_sizes_are_told_of_size():
    dataset = StreamDataset([4, 5], lambda n: iter(np.zeros((2, 3, n, n), np.uint8)), 2, time_steps=2)
    with pytest.raises(ItemError, match=r"size=\(height, width\) of VideoStream"):
        list(StreamDataLoader(dataset))


def a_batch():
    streams = lambda _: ({"image": np.zeros(2), "label": i} for i in range(2))  # noqa: E731
    return next(iter(StreamDataLoader(StreamDataset([0], streams, 1, time_steps=2))))


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (lambda batch: batch["data"], "write batch.data"),
        (lambda batch: batch["image"], r"write batch.data\['image'\]"),
        (lambda batch: batch["sources"], "use batch.source_index"),
        (lambda batch: batch[0], "x, y = batch.data for streams of pairs"),
        (lambda batch: max(*batch), "x, y = batch.data for streams of pairs"),
    ],
)
def test_a_batch_that_is_taken_for_a_dict_or_a_tuple_says_what_it_has(wrong, remedy):
    with pytest.raises(TypeError, match=f"StreamBatch has fields, and no entries; .*{remedy}"):
        wrong(a_batch())


def test_a_field_of_another_library_is_named_with_ours():
    batch = a_batch()
    with pytest.raises(AttributeError, match=r"no attribute 'shape'; len\(batch\) is B, batch.time_steps is T"):
        _ = batch.shape
    with pytest.raises(AttributeError, match=r"no attribute 'is_start'; use batch.is_first"):
        _ = batch.is_start
    with pytest.raises(AttributeError, match=r"no attribute 'seq_idx'; use recurrent.seq_idx\(batch\)"):
        _ = batch.seq_idx
    assert not isinstance(batch, Iterable), "trainers would look for tensors in it"
