"""States that this library saved before are still taken up: tests/data has some, with the batches that came after.

`python tests/state/test_saved_states.py FILE` saves such states with the library as it stands.
"""

import itertools
import json
import pathlib
import sys

import pytest
from kinds_of_loaders import KINDS, plain

from stream_dataloader import StreamDataLoader, StreamDataset

DATA = pathlib.Path(__file__).parents[1] / "data"
VERSION_0_1_0 = json.loads((DATA / "states_0_1_0.json").read_text())
SAVED = json.loads((DATA / "states_of_all_kinds.json").read_text())
BATCHES = 4  # delivered before the state was saved


def saved(build):
    """A state after some batches, and the batches that come after it."""
    loader = build()
    batches = iter(loader)
    for _ in range(BATCHES):
        try:
            next(batches)
        except StopIteration:  # an epoch of fewer batches
            batches = iter(loader)
            next(batches)
    state = loader.state_dict()
    after = [plain(batch) for batch in itertools.islice(batches, 4)]
    if not after:  # an epoch of n batches was over
        other = build()
        other.load_state_dict(state)
        after = [plain(batch) for batch in itertools.islice(other, 4)]
    return json.loads(json.dumps({"state": state, "after": after}))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_of_each_kind_goes_on_where_it_stood(kind, workers):
    loader = KINDS[kind](num_workers=workers)
    loader.load_state_dict(SAVED[kind]["state"])
    expected = SAVED[kind]["after"]
    assert expected
    assert [plain(batch) for batch in itertools.islice(loader, len(expected))] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_of_each_kind_is_as_it_was(kind):
    found = saved(KINDS[kind])
    for group in ("group_0", "group_1"):
        if group in found["state"]:
            del found["state"][group][4:]  # what items look like, which states did not say then
    assert found == SAVED[kind]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", VERSION_0_1_0["cases"])
def test_a_state_of_version_0_1_0_goes_on_where_it_stood(name, workers):
    given, case = VERSION_0_1_0, VERSION_0_1_0["cases"][name]
    dataset = StreamDataset(
        given["lengths"], range, given["batch_size"], shuffle=True, seed=given["seed"], **case["dataset"]
    )
    loader = StreamDataLoader(dataset, num_workers=workers, **case["loader"])
    loader.load_state_dict(case["state"])
    batches = iter(loader)
    for expected in case["after"]:
        batch = next(batches)
        assert [batch.source.T.tolist(), batch.position.T.tolist(), batch.mask.T.tolist()] == expected


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(json.dumps({kind: saved(build) for kind, build in KINDS.items()}))
