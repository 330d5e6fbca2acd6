"""Ranks that train together: each carries the state of its own lanes."""

import pytest
import torch
import torch.distributed as dist
from rank_processes import RankProcesses
from torch import nn

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState, merge_states

LENGTHS = [7, 3, 5, 1, 4, 2, 6, 3, 5, 2]


def ones(length):
    return (torch.ones(1) for _ in range(length))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.start = nn.GRU(1, 3), nn.Parameter(torch.zeros(1, 1, 3))

    def forward(self, data, state):
        return self.gru(data, state)


def train(rank):
    """Train with a learnt initial state; what it became, and in how many steps this rank had no start."""
    model = nn.parallel.DistributedDataParallel(Model())
    carry, quiet = RecurrentState(model.module.start, batch_dim=1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = StreamDataset(LENGTHS, ones, 1, lengths=LENGTHS, time_steps=2, shuffle=True, seed=0)
    for batch in StreamDataLoader(dataset, groups=2):
        output, state = model(batch.data, carry.before(batch))
        carry.after(batch, state)
        optimizer.zero_grad()
        output[batch.mask].square().sum().backward()
        optimizer.step()
        quiet += not batch.reset.any()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, carry.state_dict())
    return model.module.start.tolist(), quiet, merge_states(gathered)["lanes"]


@pytest.mark.slow
def test_a_learnt_state_is_the_same_on_all_ranks_though_streams_start_in_other_steps():
    with RankProcesses(2) as ranks:
        (one, quiet, lanes), (other, other_quiet, _) = ranks.run(2, train)
    assert one == other
    assert any(value != 0 for value in one[0][0])
    assert quiet
    assert other_quiet  # without a gradient there DistributedDataParallel would raise an error
    assert lanes == [0, 1]
