"""What trainers ask a loader for, because torch's `DataLoader` has it."""

import inspect
import multiprocessing

import pytest
from cases import Case, key
from torch.utils.data import DataLoader

from stream_dataloader import StreamDataLoader

CASE = Case([4, 0, 9, 2, 2, 7, 1, 3], 4, 3, shuffle=True, seed=1)
ABSENT = {"sampler", "batch_sampler", "drop_last"}


def test_what_torchs_loader_has_and_ours_has_not_is_refused_with_a_remedy():
    loader = StreamDataLoader(CASE.dataset())
    for name in ABSENT:
        assert getattr(loader, name, "default") == "default"
        with pytest.raises(AttributeError, match=f"StreamDataLoader has no {name}: .*(set_epoch|load_state_dict)"):
            getattr(loader, name)


@pytest.mark.parametrize("workers", [0, 2])
def test_without_an_option_the_answers_are_those_of_torchs_loader(workers):
    # what torch answers for a dataset that yields whole batches, and for one that yields ours
    loader = StreamDataLoader(CASE.dataset(), workers)
    torchs = DataLoader(CASE.dataset(), None, num_workers=workers)
    options = set(inspect.signature(DataLoader).parameters) - {"shuffle", "batch_size", "collate_fn", "dataset"}
    for name in options - ABSENT:
        assert getattr(loader, name) == getattr(torchs, name), name
    assert (loader.batch_size, loader.in_order) == (4, True)


def test_options_that_are_given_are_the_answers():
    options = {"prefetch_factor": 3, "persistent_workers": True, "worker_init_fn": print, "timeout": 7}
    loader = StreamDataLoader(CASE.dataset(), 2, multiprocessing_context="forkserver", **options)
    for name, value in options.items():
        assert getattr(loader, name) == value
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    spawn = multiprocessing.get_context("spawn")
    assert StreamDataLoader(CASE.dataset(), 2, multiprocessing_context=spawn).multiprocessing_context is spawn


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_init_fn_that_is_set_later_is_for_the_next_workers(persistent, tmp_path):
    whole = StreamDataLoader(CASE.dataset())
    loader = StreamDataLoader(CASE.dataset(), 2, persistent_workers=persistent)
    batches = iter(loader)
    first = key(next(batches))
    loader.worker_init_fn = lambda worker: (tmp_path / str(worker)).touch()
    assert [first, *map(key, batches)] == list(map(key, whole))  # what is being read goes on
    assert not list(tmp_path.iterdir())
    assert list(map(key, loader)) == list(map(key, whole))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    with pytest.raises(TypeError, match="worker_init_fn"):
        loader.worker_init_fn = 3


def test_a_batch_shows_its_fields_and_methods_only():
    shown = {name for name in dir(next(iter(StreamDataLoader(CASE.dataset())))) if not name.startswith("_")}
    fields = (
        "data reset is_first mask source_index position stream_seed worker_id lane batch_index epoch is_last member"
    )
    fields += " time_steps worker host is_padding context"
    methods = "without_context map state_dict to split_lanes cuda cpu pin_memory"
    methods += " flatten_lanes unflatten_lanes"
    assert shown == set(f"{fields} {methods}".split())
