"""Loops as torchtitan and torchtune have them: of the loader they need the protocol of `StatefulDataLoader`, no more.

Both count batches. They save and load the loader along with the model, one as an object in the dict that
`torch.distributed.checkpoint` saves, the other as its `state_dict()` in a file of `torch.save`.
"""

import pytest
import torch
from cases import key

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info


def things(workers):
    """A model that knows how many batches it has seen, and a loader."""
    model = torch.nn.Module()
    model.register_buffer("step", torch.tensor(0))
    draws = lambda n: iter(get_stream_info().rng.normal(size=(n, 3)))  # noqa: E731
    dataset = StreamDataset([7, 12, 3, 9, 5, 8, 4, 11], draws, 3, time_steps=4, shuffle=True, seed=0)
    return {"model": model, "dataloader": StreamDataLoader(dataset, workers)}


def train(model, dataloader, until):
    """One epoch after another until so many batches are seen."""
    seen = []
    while model.step < until:
        for batch in dataloader:
            seen.append(key(batch))
            model.step += 1
            if model.step == until:
                break
    return seen


@pytest.mark.one_of_each
@pytest.mark.parametrize("stop", [4, 11])
@pytest.mark.parametrize(("before", "after", "way"), [(2, 0, "objects"), (0, 2, "one file")])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_loop_goes_on_bit_for_bit(before, after, stop, way, tmp_path):
    import torch.distributed.checkpoint as checkpointing  # takes a second
    from torch.distributed.checkpoint.stateful import Stateful

    whole = train(**things(0), until=16)
    assert whole[10][-1] == 1, "the second epoch"
    first, second = things(before), things(after)
    head = train(**first, until=stop)
    assert isinstance(first["dataloader"], Stateful)
    if way == "objects":
        checkpointing.save(first, checkpoint_id=tmp_path)
        checkpointing.load(second, checkpoint_id=tmp_path)
    else:
        torch.save({name: thing.state_dict() for name, thing in first.items()}, tmp_path / "recipe_state.pt")
        for name, state in torch.load(tmp_path / "recipe_state.pt", weights_only=True).items():
            second[name].load_state_dict(state)
    assert head + train(**second, until=16) == whole
