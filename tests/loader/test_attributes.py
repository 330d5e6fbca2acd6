"""What trainers ask a loader for, because torch's `DataLoader` has it."""

import inspect
import multiprocessing

import pytest
from cases import Case, key
from torch.utils.data import DataLoader

from stream_dataloader import StreamDataLoader

CASE = Case([4, 0, 9, 2, 2, 7, 1, 3], 4, 3, shuffle=True, seed=1)
ABSENT = {"sampler", "batch_sampler", "drop_last"}


def torchs():
    """The attributes of a torch `DataLoader` that are its options."""
    return set(inspect.signature(DataLoader).parameters) - {"shuffle"}


def test_every_option_of_torchs_loader_is_answered_or_refused_with_a_remedy():
    loader = StreamDataLoader(CASE.dataset())
    for name in torchs() | {"in_order"}:
        if name not in ABSENT:
            getattr(loader, name)
            continue
        assert not hasattr(loader, name)
        assert getattr(loader, name, "default") == "default"
        with pytest.raises(AttributeError, match=f"StreamDataLoader has no {name}: .*(set_epoch|load_state_dict)"):
            getattr(loader, name)


def test_without_an_option_the_answers_are_those_of_torchs_loader():
    # what torch answers for a dataset that yields whole batches, and for one that yields ours
    for workers in (0, 2):
        loader, torchs_own = (
            StreamDataLoader(CASE.dataset(), workers),
            DataLoader(CASE.dataset(), None, num_workers=workers),
        )
        for name in torchs() - ABSENT - {"batch_size", "collate_fn", "dataset"}:
            assert getattr(loader, name) == getattr(torchs_own, name), name
        assert loader.batch_size == 4


def test_options_that_are_given_are_the_answers():
    def init(worker):
        pass

    loader = StreamDataLoader(
        CASE.dataset(),
        2,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="forkserver",
        worker_init_fn=init,
        timeout=7,
    )
    assert (loader.prefetch_factor, loader.persistent_workers, loader.timeout) == (3, True, 7)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert loader.worker_init_fn is init
    spawn = multiprocessing.get_context("spawn")
    assert StreamDataLoader(CASE.dataset(), 2, multiprocessing_context=spawn).multiprocessing_context is spawn


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_init_fn_that_is_set_later_is_for_the_next_workers(persistent, tmp_path):
    expected = StreamDataLoader(CASE.dataset())
    expected = [[key(batch) for batch in expected] for _ in range(2)]
    loader = StreamDataLoader(CASE.dataset(), 2, persistent_workers=persistent)
    batches = iter(loader)
    first = [key(next(batches))]
    loader.worker_init_fn = lambda worker: (tmp_path / str(worker)).touch()
    first += [key(batch) for batch in batches]  # what is being read goes on
    assert first == expected[0]
    assert not list(tmp_path.iterdir())
    assert [key(batch) for batch in loader] == expected[1]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    with pytest.raises(TypeError, match="worker_init_fn must be callable, and is 3"):
        loader.worker_init_fn = 3


def test_a_batch_shows_its_fields_and_methods_only():
    shown = {name for name in dir(next(iter(StreamDataLoader(CASE.dataset())))) if not name.startswith("_")}
    fields = "data reset is_start mask source position worker_id lane step epoch is_last member time_steps worker host"
    methods = "map state_dict to split_lanes cuda cpu pin_memory"
    named = "is_first is_init prev_exists seq_idx done segments cu_seqlens position_ids flatten_lanes unflatten_lanes"
    assert shown == set(f"{fields} {methods} {named}".split())
