"""States that earlier versions saved are still taken up: tests/data has some, with the batches that came after them."""

import json

import pytest
from helpers import ROOT

from stream_dataloader import StreamDataLoader, StreamDataset

SAVED = json.loads((ROOT / "tests" / "data" / "states_0_1_0.json").read_text())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SAVED["cases"])
def test_a_state_of_version_0_1_0_goes_on_where_it_stood(name, workers):
    case = SAVED["cases"][name]
    dataset = StreamDataset(
        SAVED["lengths"], range, batch_size=SAVED["batch_size"], shuffle=True, seed=SAVED["seed"], **case["dataset"]
    )
    loader = StreamDataLoader(dataset, num_workers=workers, **case["loader"])
    loader.load_state_dict(case["state"])
    batches = iter(loader)
    for expected in case["after"]:
        batch = next(batches)
        assert [batch.source.T.tolist(), batch.position.T.tolist(), batch.mask.T.tolist()] == expected
