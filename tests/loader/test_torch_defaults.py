"""The program's default device and dtype change no batch: what the loader makes is on the CPU, in dtypes of its own.

"meta" stands for "cuda" here: what is made there by mistake has no values, and cannot be combined with the rest.
"""

import contextlib

import numpy as np
import pytest
import torch
from helpers import START_METHODS, loader_of
from kinds_of_loaders import KINDS

from stream_dataloader import LaneBatchSampler, StreamDataLoader, StreamDataset, recurrent
from stream_dataloader.recurrent import RecurrentState
from stream_dataloader.testing.resume import batch_key

DEFAULTS = [("meta", torch.float64), ("cpu", torch.bfloat16)]


@contextlib.contextmanager
def defaults(device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


@pytest.fixture(params=DEFAULTS, ids=str)
def other(request):
    return lambda: defaults(*request.param)


def keys(loader, most=6):
    return [batch_key(batch) for _, batch in zip(range(most), loader, strict=False)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "sampler" not in kind])
def test_batches_of_each_kind_of_loader_are_the_same(kind):
    expected = keys(KINDS[kind]())
    with defaults("meta", torch.float64):
        assert keys(KINDS[kind]()) == expected


def of_all(length):
    """Items of a stream: numbers, arrays, tensors, and what only an object can hold."""
    for item in range(length):
        number = item + 0.1
        yield {
            "number": number,
            "pair": (item, item % 2 == 0),
            "array": np.full(2, number, np.float16),
            "tensor": torch.full((2,), number, dtype=torch.bfloat16, device="cpu"),
            "text": str(number),
        }


FILLS = {"number": 0.1, "pair": (-1, True), "array": (0.1, 0.2), "tensor": 0.3}


def made(**options):
    defaults = {"time_steps": 2, "windows": "packed", "shuffle": True, "mark_ends": True, "fill_value": FILLS}
    return StreamDataset([5, 3, 0, 4, 7], of_all, 3, **(defaults | {"seed": 0} | options))


def fields_of(batch):
    """All that a batch makes of its fields."""
    segments = recurrent.segments(batch)
    names = ("is_init", "prev_exists", "seq_idx", "done", "cu_seqlens", "position_ids")
    fields = {name: getattr(recurrent, name)(batch) for name in names}
    fields |= {f"segments.{name}": value for name, value in vars(segments).items() if isinstance(value, torch.Tensor)}
    fields |= {
        "stream": recurrent.position_ids(batch, "stream"),
        "lanes": segments.to_lanes(segments.row + 1, before=None),
    }
    fields |= {"lane": batch.lane, "worker_id": batch.worker_id, "reset": batch.reset, "stream_seed": batch.stream_seed}
    assert {str(field.device) for field in fields.values()} == {"cpu"}, fields
    text = repr(batch)
    return {name: (str(field.dtype), field.tolist()) for name, field in fields.items()}, batch_key(batch), text


WAYS = {
    "here": {},
    **{f"workers, {p if isinstance(p, str) else p.values[0]}": (2, p) for p in START_METHODS if isinstance(p, str)},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "queue": {"num_workers": 2, "messages": True},
    "kept": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("way", WAYS)
def test_what_a_batch_makes_is_the_same(way, other):
    options = WAYS[way]
    if isinstance(options, tuple):
        options = {"num_workers": options[0], "multiprocessing_context": options[1]}
    expected = [fields_of(batch) for batch in loader_of(made(), **options)]
    with other():
        assert [fields_of(batch) for batch in loader_of(made(), **options)] == expected


def torch_numbers(length):
    return (torch.full((), item + 0.1).item() for item in range(length))  # of the default dtype, on the default device


@pytest.mark.parametrize("method", START_METHODS)
def test_workers_have_the_programs_dtype_and_the_cpu(method):
    """So a stream that relies on them yields the same with each start method; a meta tensor has no item."""
    with defaults("meta", torch.float64):
        dataset = StreamDataset([3, 2], torch_numbers, 2, time_steps=3, seed=0)
        (batch,) = StreamDataLoader(dataset, 2, multiprocessing_context=method)
        assert batch.data[:, 0].tolist() == [0.1, 1.1, 2.1]


def test_a_resume_carried_states_and_plain_loaders_are_the_same(other):
    def run():
        loader, carry = StreamDataLoader(made(windows="aligned")), RecurrentState(burn_in=1)
        told = []
        for batch in loader:
            state = carry.before(batch)
            numbers = batch.data["number"].sum(0, dtype=torch.float64)
            state = numbers if state is None else state + numbers
            told.append((state.tolist(), carry.loss_mask(batch).tolist()))
            carry.after(batch, state)
            saved = batch.state_dict(), carry.state_dict()
            if batch.batch_index == 1:
                loader = StreamDataLoader(made(windows="aligned"), 2)
                loader.load_state_dict(saved[0])
                carry = RecurrentState(burn_in=1)
                carry.load_state_dict(saved[1])
                told += [batch_key(batch) for batch in loader]
        told += [batch_key(part) for part in made()]  # torch's own loader fails by itself
        told += [[int(i) for i in rows] for rows in LaneBatchSampler(2, 2, groups=[[0, 1, 2], [3, 4]], seed=1)]
        return told

    expected = run()
    with other():
        assert run() == expected


def test_a_seed_is_drawn_from_torchs_generator(other):
    def seeds():
        torch.manual_seed(3)
        return made(seed=None)._rules.seed, LaneBatchSampler(1, 2, groups=[[0, 1], [2]]).state_dict()["seed"]

    expected = seeds()
    with other():
        assert seeds() == expected


def test_an_error_of_torch_where_workers_start_is_not_a_death(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("Expected another device")

    monkeypatch.setattr(torch.Tensor, "random_", refuse)
    with pytest.raises(RuntimeError, match=r"^Expected another device$"):
        next(iter(StreamDataLoader(made(), 2)))
