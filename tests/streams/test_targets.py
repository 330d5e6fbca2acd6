"""Targets: by one rule, each token is an item, and the last one's target is `ignore_index`."""

import contextlib
import itertools

import helpers
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import cross_entropy

from stream_dataloader import Sections, StateError, StreamDataLoader, StreamDataset, stores
from stream_dataloader.streams import TextStream
from stream_dataloader.testing import check_resume

TEXT = b"to be or not to be,\nthat is the question\n" * 6


def letters(text):
    return list(text.encode())


def of_texts(**options):
    def opened(folder, **targets):
        (folder / "a.txt").write_bytes(TEXT)
        return [folder / "a.txt"], TextStream(targets=True, block_bytes=16, longest_line_bytes=16, **options, **targets)

    return opened


def of_a_file(folder, **targets):
    np.frombuffer(TEXT, np.uint8).astype(np.uint16).tofile(folder / "a.bin")
    return stores.open(folder / "a.bin", stored_dtype="uint16", dtype="int64", targets=True, **targets)


def of_a_row(folder, **targets):
    pq.write_table(pa.table({"ids": pa.array([list(TEXT)])}), folder / "a.parquet")
    return stores.open(folder / "a.parquet", elements=True, targets=True, **targets)


KINDS = {
    "bytes": of_texts(units="bytes"),
    "characters": of_texts(dtype="int32"),
    "tokens": of_texts(tokenizer=letters),
    "file": of_a_file,
    "row": of_a_row,
}


@pytest.mark.parametrize(
    ("kind", "ignore_index"), [*((kind, -1) for kind in KINDS), ("bytes", -100), ("file", 1 << 40)]
)
def test_the_loss_is_that_of_a_plain_loop_over_the_whole_text(tmp_path, kind, ignore_index):
    sources, open_stream = KINDS[kind](tmp_path, **{} if ignore_index == -100 else {"ignore_index": ignore_index})
    scores = torch.randn(256, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def summed(inputs, targets):
        return cross_entropy(scores[inputs.long()], targets, ignore_index=ignore_index, reduction="sum")

    expected = sum(-scores[a].log_softmax(0)[b] for a, b in itertools.pairwise(TEXT))
    inputs, targets = torch.tensor(list(TEXT)), torch.tensor([*TEXT[1:], ignore_index])
    torch.testing.assert_close(summed(inputs, targets), expected)

    def loader(workers):
        options = {"lengths": [len(TEXT)], "sections": Sections(50, jitter=True), "shuffle": True, "seed": 0}
        options["fill_value"] = {"target": ignore_index}
        dataset = StreamDataset(sources, open_stream, 3, time_steps=8, windows="packed", **options)
        return StreamDataLoader(dataset, workers)

    total, found = 0.0, torch.full((len(TEXT),), -7)
    for batch in loader(0):
        at = batch.position[batch.mask]
        assert torch.equal(batch.data["input"][batch.mask].long(), inputs[at])
        found[at] = batch.data["target"][batch.mask]
        total += summed(batch.data["input"].flatten(), batch.data["target"].flatten())  # with the padding
    assert torch.equal(found, targets)
    torch.testing.assert_close(total, expected)
    if ignore_index == -1:
        check_resume(loader, num_workers=(0,), epochs=1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_start_and_read_has_the_same_items(tmp_path, kind):
    sources, open_stream = KINDS[kind](tmp_path)
    pairs = list(zip(TEXT, [*TEXT[1:], -100], strict=True))
    if kind == "file" or kind == "row":
        assert open_stream.lengths.tolist() == [len(TEXT)]
    else:
        assert open_stream.length(sources[0]) in (None, len(TEXT))
    for start in (0, 1, 15, 16, 17, len(TEXT) - 1, len(TEXT)):
        items = helpers.read(open_stream(sources[0], start=start))
        assert [(int(item["input"]), int(item["target"])) for item in items] == pairs[start:]
        for room in (1, 5, 16):
            stream, found = open_stream(sources[0], start=start), []
            dtype = getattr(open_stream, "dtype", None) or np.int64
            out = {"input": np.zeros(room, dtype), "target": np.zeros(room, np.int64)}
            while count := stream.read_into(out):
                found += zip(*(out[name][:count].tolist() for name in ("input", "target")), strict=True)
            stream.close()
            assert found == pairs[start:]
    with pytest.raises(ValueError, match=str(len(TEXT))):
        open_stream(sources[0], start=len(TEXT) + 1)


def test_the_unit_before_an_error_has_no_target(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 20 + b"\xff")
    for block in (16, 20, 64):
        out = {"input": np.zeros(50, np.int64), "target": np.zeros(50, np.int64)}
        with contextlib.closing(TextStream(targets=True, block_bytes=block)(tmp_path / "a.txt")) as stream:
            assert stream.read_into(out) == 19
            for _ in range(2):
                with pytest.raises(ValueError, match="byte 20"):
                    stream.read_into(out)
        assert out["target"][:19].tolist() == [ord("a")] * 19


def test_a_number_that_is_a_token_or_no_target_is_refused(tmp_path):
    def opened(kind, **options):
        return lambda: KINDS[kind](tmp_path, **options)

    for make, error, message in (
        (opened("bytes", ignore_index=0), ValueError, "ignore_index is 0, a token that may come.*such as -100"),
        (opened("characters", ignore_index=0x10FFFF), ValueError, "is 1114111, a token"),
        (lambda: TextStream(vocabulary="ab", targets=True, ignore_index=1), ValueError, "is 1, a token"),
        (lambda: TextStream(vocabulary={"a": 5}, unknown=2, targets=True, ignore_index=2), ValueError, "is 2, a token"),
        (opened("file", eos_token=10, ignore_index=10), ValueError, "is 10, a token"),
        (opened("file", bos_token=10, ignore_index=10), ValueError, "is 10, a token"),
        (lambda: TextStream(ignore_index=-1), ValueError, "give targets=True"),
        *((opened(kind, ignore_index=1 << 63), ValueError, "give an int64") for kind in KINDS),
        *((opened(kind, ignore_index="-1"), TypeError, "no whole number") for kind in KINDS),
    ):
        with pytest.raises(error, match=message):
            make()
    assert TextStream(vocabulary={"a": 5}, targets=True, ignore_index=np.int64(0)).ignore_index == 0
    for name in ("file", "row"):  # of which it is not known whether they pad
        assert KINDS[name](tmp_path, ignore_index=0)


@pytest.mark.parametrize("kind", ["file", "row"])
def test_a_run_does_not_go_on_with_other_targets(tmp_path, kind):
    def loader(**targets):
        return StreamDataLoader(StreamDataset(*KINDS[kind](tmp_path, **targets), 1, time_steps=4, seed=0))

    state = next(iter(loader(ignore_index=-1))).state_dict()
    loader(ignore_index=-1).load_state_dict(state)
    with pytest.raises(StateError, match="other sources"):
        loader(ignore_index=-2).load_state_dict(state)
