"""A policy with a memory of key frames: what a lamp showed early decides what to do at the end of an episode.

    python examples/robot_memory.py [--memory none] [--checkpoint FILE]
    torchrun --nproc_per_node 2 examples/robot_memory.py

Items come from a map-style dataset through torch's own DataLoader, as of LeRobot: put `LeRobotDataset` in place of
`Episodes`, and its episodes' lengths in place of `lengths`. With a checkpoint it goes on where it was saved, with the
same batches and memories, also on another number of ranks.
"""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from stream_dataloader import LaneBatchSampler, StreamBatch, collate_lanes, lane_dataset, merge_states
from stream_dataloader.recurrent import LaneMemory

RECALL, KEPT = 8, 6  # steps at the end that ask for both lamps; key frames of a lane


class Episodes(Dataset[dict[str, torch.Tensor]]):
    """Two lamps shine for 3 steps each, red or green; the last actions repeat both colours."""

    def __init__(self, count: int, seed: int) -> None:
        """Draw the episodes."""
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(20, 41, (count,), generator=generator).tolist()
        self.items: list[dict[str, torch.Tensor]] = []
        for length in self.lengths:
            colours = torch.randint(0, 2, (2,), generator=generator) * 2.0 - 1
            seen = torch.randn(length, 2, generator=generator) * 0.1
            middle = int(torch.randint(4, length - RECALL - 3, (), generator=generator))
            seen[:3, 0] += colours[0]
            seen[middle : middle + 3, 1] += colours[1]
            for step in range(length):
                asks = torch.tensor(step >= length - RECALL)
                state = torch.cat([seen[step], asks.float()[None]])
                self.items.append({"state": state, "action": colours * asks, "asks": asks})

    def __len__(self) -> int:
        """Count the items of all episodes."""
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one step."""
        return self.items[index]


class Policy(torch.nn.Module):
    """Looks at the step and at the key frames of its lane; `remembers=False` writes none."""

    def __init__(self, *, remembers: bool) -> None:
        """Make the layers."""
        super().__init__()
        self.remembers = remembers
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, batch: StreamBatch, memory: LaneMemory[list[torch.Tensor]]) -> torch.Tensor:
        """Return actions `(T, B, 2)`; a step in which a lamp shines becomes a key frame."""
        states, actions = batch.data["state"], []
        for t, banks in memory.steps(batch):
            frames = torch.stack([sum(bank or [], torch.zeros(2)) for bank in banks])
            actions.append(self.layers(torch.cat([states[t], frames], 1)))
            for bank, frame in zip(banks, states[t, :, :2], strict=True):
                if bank is not None and self.remembers and frame.abs().max() > 0.6:
                    bank.append(frame)
                    del bank[:-KEPT]
        return torch.stack(actions)


def right(policy: Policy) -> float:
    """Return the share of unseen episodes that end with both colours right, played with the same memory."""
    unseen, wrong = Episodes(100, seed=1), set()
    sampler = LaneBatchSampler(10, 8, lengths=unseen.lengths, rank=0, world_size=1)
    memory: LaneMemory[list[torch.Tensor]] = LaneMemory(rank=0, world_size=1)
    with torch.no_grad():
        for batch in DataLoader(lane_dataset(unseen), batch_sampler=sampler, collate_fn=collate_lanes):
            missed = (policy(batch, memory).sign() != batch.data["action"]).any(-1) & batch.data["asks"] & batch.mask
            wrong |= set(batch.source_index[missed].tolist())
    return 1 - len(wrong) / len(unseen.lengths)


def main() -> None:
    """Train, save and evaluate."""
    parser = argparse.ArgumentParser(description="A policy with a memory of key frames.")
    parser.add_argument("--memory", choices=["lanes", "none"], default="lanes")
    parser.add_argument("--batches", type=int, default=250)
    parser.add_argument("--checkpoint", type=pathlib.Path)
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    torch.manual_seed(0)
    episodes, policy = Episodes(200, seed=0), Policy(remembers=options.memory == "lanes")
    model = torch.nn.parallel.DistributedDataParallel(policy) if ranks > 1 else policy
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    # Eight lanes in all, however many ranks share them; the endless run is cut into epochs for `len`.
    sampler = LaneBatchSampler(
        8 // ranks, 8, lengths=episodes.lengths, padding_mode="cycle", shuffle=True, seed=0,
        virtual_ranks=2, batches_per_epoch=options.batches,
    )  # fmt: skip
    loader = DataLoader(lane_dataset(episodes), batch_sampler=sampler, collate_fn=collate_lanes, num_workers=1)
    memory: LaneMemory[list[torch.Tensor]] = LaneMemory()
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        policy.load_state_dict(saved["policy"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
        memory.load_state_dict(saved["memory"])

    for batch in loader:
        asks = batch.data["asks"] & batch.mask
        wrong = (model(batch, memory) - batch.data["action"]).square().sum(-1)
        loss = wrong[asks].sum() / asks.sum().clamp(min=1)  # some batches do not ask
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.checkpoint is not None and (batch.batch_index + 1) % 50 == 0:
            states = [memory.state_dict()]
            if ranks > 1:
                states *= ranks
                dist.all_gather_object(states, memory.state_dict())
            if ranks == 1 or dist.get_rank() == 0:
                whole = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
                whole |= {"sampler": sampler.state_dict(batch), "memory": merge_states(states)}
                torch.save(whole, options.checkpoint)
    if ranks == 1 or dist.get_rank() == 0:
        share = right(policy)
        print(f"memory: {options.memory}; both colours right in {share:.0%} of 100 unseen episodes")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
