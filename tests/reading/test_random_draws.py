# ruff: noqa: NPY002  the legacy generator is what this is about
"""Draws of streams from the global generators of `random`, numpy and torch: none comes twice in workers and epochs."""

import random

import cv2
import numpy as np
import pytest
import torch
import worker_streams
from helpers import START_METHODS, declared, loader_of
from kinds_of_loaders import Counted
from torch.utils.data import DataLoader
from worker_streams import few, kill_self

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, interleave
from stream_dataloader.testing import check_resume

LENGTHS = [7, 4, 0, 5, 3, 6, 1, 8, 2, 5]


def draw():
    """Two of each generator. Half of numpy's normal numbers are kept back for the next call."""
    return [f() for f in (random.random, np.random.random, lambda: torch.rand((), dtype=torch.float64).item())] + [
        random.gauss(0, 1),
        np.random.standard_normal(),
        torch.randn((), dtype=torch.float64).item(),
    ]


def drawing(length):
    for _ in range(length):
        yield np.array(draw())


@declared
def drawing_early(length):
    yield from drawing(length)


def seed_worker(worker_id):
    """PyTorch's recipe, from its notes on randomness."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def drawn(batches):
    """What each item drew, by source and position."""
    return {
        (source, position): tuple(row)
        for batch in batches
        for source, position, row in zip(
            batch.source_index[batch.mask].tolist(),
            batch.position[batch.mask].tolist(),
            batch.data[batch.mask].tolist(),
            strict=True,
        )
    }


def check_no_draw_twice(runs):
    for number in range(6):
        values = [row[number] for run in runs for row in run.values()]
        assert len(set(values)) == len(values), f"draw {number} repeats"


def dataset(factory=drawing, lanes=4, **options):
    return StreamDataset(LENGTHS, factory, lanes, **{"time_steps": 2, "seed": 0, "shuffle": True} | options)


LOADERS = {
    "workers": {},
    "PyTorch's recipe": {"worker_init_fn": seed_worker},
    "kept": {"persistent_workers": True},
    "kept, with the recipe": {"persistent_workers": True, "worker_init_fn": seed_worker},
    "queue": {"messages": True},
    "threads": {"worker_method": "thread"},
    "n batches": {"batches_per_epoch": 3},
    "n batches, kept": {"batches_per_epoch": 3, "persistent_workers": True},
}


@pytest.mark.parametrize("kind", LOADERS)
def test_no_draw_comes_twice_in_epochs_and_workers(kind):
    own = dataset(padding_mode="cycle") if "batches" in kind else dataset()
    loader = loader_of(own, 2, **LOADERS[kind])
    check_no_draw_twice([drawn(loader) for _ in range(3)])


def drawing_of_opencv(length):
    for _ in range(length):
        yield cv2.randu(np.zeros((1, 6)), 0, 1)[0]


@pytest.mark.parametrize("kind", LOADERS)
def test_no_draw_of_opencv_comes_twice_either(kind):
    own = dataset(drawing_of_opencv, padding_mode="cycle") if "batches" in kind else dataset(drawing_of_opencv)
    loader = loader_of(own, 2, **LOADERS[kind])
    check_no_draw_twice([drawn(loader) for _ in range(3)])


@pytest.mark.parametrize(
    ("factory", "method"),
    [
        *((drawing_of_opencv, method) for method in ("fork", "forkserver")),
        pytest.param(worker_streams.first_to_draw_of_opencv, "forkserver", marks=pytest.mark.any_start_method),
    ],
)
def test_opencv_is_seeded_however_workers_start_and_wherever_it_is_imported(factory, method):
    for kept in (False, True):
        loader = StreamDataLoader(dataset(factory), 2, multiprocessing_context=method, persistent_workers=kept)
        check_no_draw_twice([drawn(loader) for _ in range(2)])


def test_worker_init_fn_may_seed_opencv():
    loader = StreamDataLoader(dataset(drawing_of_opencv), 1, worker_init_fn=lambda worker: cv2.setRNGSeed(5))
    assert set(drawn(loader).values()) == set(drawn(loader).values())  # shuffled anew


@pytest.mark.parametrize("method", START_METHODS)
def test_no_draw_comes_twice_on_ranks(method):
    loaders = [
        StreamDataLoader(dataset(lengths=LENGTHS), 2, rank=rank, world_size=2, multiprocessing_context=method)
        for rank in range(2)
    ]
    check_no_draw_twice([drawn(loader) for loader in loaders for _ in range(2)])


def test_no_draw_comes_twice_after_a_restart_or_a_resume(tmp_path):
    kill = few(tmp_path / "killed", kill_self)

    def killing(length):
        for position in range(length):
            if (length, position) == (8, 4):
                kill()
            yield np.array(draw())

    for kept in (False, True):
        (tmp_path / "killed").unlink(missing_ok=True)
        loader = StreamDataLoader(dataset(killing), 2, max_restarts=1, persistent_workers=kept)
        check_no_draw_twice([drawn(loader) for _ in range(2)])
        assert loader.stats().restarts == 1
    whole = list(StreamDataLoader(dataset(), 2))
    resumed = StreamDataLoader(dataset(), 2)
    resumed.load_state_dict(whole[2].state_dict())
    check_no_draw_twice([drawn(whole[:3]), drawn(resumed)])


def test_draws_are_those_of_the_run_before_with_the_same_seed_and_workers():
    def epochs(seed, **options):  # which lane of a worker draws first depends on timing with aligned windows
        loader = StreamDataLoader(dataset(seed=seed, windows="packed"), 2, **options)
        return [drawn(loader) for _ in range(2)]

    assert epochs(0) == epochs(0)
    assert epochs(0) == epochs(0, persistent_workers=True)  # workers that are kept are seeded anew in each epoch
    check_no_draw_twice(epochs(0) + epochs(1))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_leave_the_programs_generators_alone_and_reading_here_draws_from_them(workers):
    seed_all(5)
    expected = [draw() for _ in range(sum(LENGTHS) + 1)]
    seed_all(5)
    here = drawn(StreamDataLoader(dataset(), workers))
    if workers:
        assert draw() == expected[0]
    else:
        assert sorted(here.values()) == sorted(map(tuple, expected[:-1]))
        assert draw() == expected[-1]


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


SEEDED = [(0, 4, 2), (1, 4, 2), (2, 4, 2), (3, 3, 5), (0, 1, 1), (2, 5, 3)]


def test_seeded_draws_are_the_same_for_any_workers_lanes_and_windows():
    """They depend on (seed, epoch, source) alone."""
    expected = drawn(StreamDataLoader(dataset(lanes=1, seed_globals=True, shuffle=False)))
    epochs = None
    for workers, lanes, time_steps in SEEDED:
        loader = StreamDataLoader(dataset(lanes=lanes, time_steps=time_steps, seed_globals=True), workers)
        found = [drawn(loader) for _ in range(2)]
        epochs = epochs or found
        assert found == epochs, (workers, lanes, time_steps)
    assert epochs[0] == expected
    check_no_draw_twice([*epochs, drawn(StreamDataLoader(dataset(seed_globals=True, seed=1)))])


SEEDED_KINDS = {
    "kept": {"persistent_workers": True},
    "queue": {"messages": True},
    "the recipe": {"worker_init_fn": seed_worker},
    "forkserver": {"multiprocessing_context": "forkserver"},
}


@pytest.mark.parametrize("kind", SEEDED_KINDS)
def test_seeded_draws_are_the_same_in_any_worker(kind):
    options = {"seed_globals": True, "mark_ends": True, "windows": "packed", "lookahead": 2}
    loader = loader_of(dataset(drawing_early, **options), 2, **SEEDED_KINDS[kind])
    here = StreamDataLoader(dataset(**options))
    for _ in range(2):
        assert drawn(loader) == drawn(here)


def test_seeded_draws_are_the_same_with_torchs_own_loader_and_in_a_mix():
    plain = DataLoader(dataset(seed_globals=True), batch_size=None, num_workers=2)
    assert drawn(plain) == drawn(StreamDataLoader(dataset(seed_globals=True)))
    both = [dataset(seed_globals=True) for _ in range(2)]
    check_no_draw_twice([found := drawn(StreamDataLoader(interleave(both), 2))])
    assert found == drawn(StreamDataLoader(interleave(both)))


def test_seeded_draws_leave_the_programs_generators_alone():
    seed_all(5)
    expected = [draw() for _ in range(200)]
    seed_all(5)
    found = []
    for _ in StreamDataLoader(dataset(seed_globals=True, mark_ends=True)):
        found.append(draw())
    assert found == expected[: len(found)]
    assert draw() == expected[len(found)]


class Saving(Counted):
    """A stream with a state, which draws where it is asked for it, and where it is closed."""

    def __next__(self):
        super().__next__()
        return np.array(draw())

    def state_dict(self):
        draw()
        return super().state_dict()

    def close(self):
        draw()


def test_draws_in_every_method_of_a_stream_are_its_own():
    seed_all(5)
    expected = draw()
    seed_all(5)
    here = drawn(StreamDataLoader(dataset(Saving, seed_globals=True)))
    assert draw() == expected
    assert here == drawn(StreamDataLoader(dataset(Saving, seed_globals=True), 3))


def test_a_stream_that_is_read_forward_resumes_with_the_same_draws():
    check_resume(lambda workers: StreamDataLoader(dataset(seed_globals=True), workers), limit=5)


def test_a_stream_that_is_opened_again_makes_the_same_draws(tmp_path):
    def breaking(length):
        for position in range(length):
            if (length, position) == (8, 4):
                few(tmp_path / "broken", lambda: 1 / 0)()
            yield np.array(draw())

    found = drawn(StreamDataLoader(dataset(breaking, seed_globals=True, retries=1), 2))
    assert (tmp_path / "broken").exists()
    assert found == drawn(StreamDataLoader(dataset(seed_globals=True)))


def cropping(length, start=0):
    crop = draw()
    for _ in range(start, length):
        yield np.array(crop)


def test_draws_of_the_opening_are_the_same_wherever_it_resumes():
    whole = list(StreamDataLoader(dataset(cropping, seed_globals=True), 2))
    for batch in whole[:-1:3]:
        resumed = StreamDataLoader(dataset(cropping, seed_globals=True))
        resumed.load_state_dict(batch.state_dict())
        assert drawn(resumed) == drawn(whole[batch.batch_index + 1 :])


def test_sections_draw_apart_and_noise_is_not_taken_for_an_ignored_start():
    options = {"lengths": LENGTHS, "sections": Sections(3, jitter=True), "seed_globals": True}
    check_no_draw_twice([found := drawn(StreamDataLoader(dataset(drawing_from, **options), 2))])
    assert found == drawn(StreamDataLoader(dataset(drawing_from, **options)))


def drawing_from(length, start=0):
    return drawing(length - start)


def test_seeded_draws_in_threads_are_refused():
    own = dataset(seed_globals=True)
    with pytest.raises(ValueError, match=r"seed_globals is True.*share its generators.*rng_at"):
        StreamDataLoader(own, 2, worker_method="thread")
