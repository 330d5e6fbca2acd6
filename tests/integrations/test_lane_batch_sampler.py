"""`LaneBatchSampler` in loaders that save samplers by themselves."""

import pytest

from stream_dataloader import LaneBatchSampler

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="install the extra integrations")

CYCLES = {"padding_mode": "cycle", "batches_per_epoch": 12}


def build(workers, options):
    sampler = LaneBatchSampler([13, 9, 11, 7], 2, 2, numbers="lengths", shuffle=True, seed=0, **options)
    return stateful.StatefulDataLoader(range(40), batch_sampler=sampler, num_workers=workers)


def read(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{"padding_mode": "zeros"}, CYCLES], ids=["zeros", "cycle"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_goes_on_with_the_batch_it_stopped_at(workers, options):
    whole = build(workers, options)
    first, second = read(whole), read(whole)
    for steps in (1, 5, len(first)):
        loader = build(workers, options)
        batches = iter(loader)
        used = [next(batches).tolist() for _ in range(steps)]
        state = loader.state_dict()
        del batches
        resumed = build(workers, options)
        resumed.load_state_dict(state)
        if steps < len(first):  # else the epoch is over with its last batch
            assert used + read(resumed) == first
        assert read(resumed) == second
