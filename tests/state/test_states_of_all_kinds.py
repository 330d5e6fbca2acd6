"""States of every kind of loader that this library saved before are still taken up, with the batches that came after.

`python tests/state/test_states_of_all_kinds.py FILE` saves such states with the library as it stands.
"""

import itertools
import json
import pathlib
import sys

import pytest
from kinds_of_loaders import KINDS, plain

FILE = pathlib.Path(__file__).parent.parent / "data" / "states_of_all_kinds.json"
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
    after = []
    for batch in batches:
        after.append(plain(batch))
        if len(after) == 4:
            break
    other = build()
    other.load_state_dict(state)
    if not after:  # an epoch of n batches was over
        after = [plain(batch) for batch in itertools.islice(other, 4)]
    return json.loads(json.dumps({"state": state, "after": after}))


SAVED = json.loads(FILE.read_text()) if FILE.exists() else {}


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


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(json.dumps({kind: saved(build) for kind, build in KINDS.items()}))
