"""Trains a GRU on several ranks with DistributedDataParallel, and goes on after a break with fewer or more of them.

    torchrun --nproc-per-node 4 examples/ddp_torchrun.py --checkpoint /tmp/run --stop-after 5
    torchrun --nproc-per-node 2 examples/ddp_torchrun.py --checkpoint /tmp/run
    torchrun --nproc-per-node 2 --max-restarts 3 examples/ddp_torchrun.py --checkpoint /tmp/run --save-every 10

Nothing about ranks has to be told to the loader: it asks torch.distributed. Streams are of uneven lengths, and yet
every rank has the same number of steps. The epoch's order is dealt to `--virtual-ranks`, here four, which any number
of ranks that divides four can host: after a break the global batches go on as if nothing had happened, and so does the
hidden state, which belongs to a lane. With `--max-restarts` torchrun starts all ranks again when one has died, and they
go on from the last checkpoint.
"""

import argparse
import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset

SIGNALS = 48
LANES = 8  # on all ranks together
HIDDEN = 16


def open_signal(seed: int) -> Iterator[torch.Tensor]:
    """One stream: a noisy sine, 20 to 200 steps long."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(20, 200, (), generator=generator))
    phase = torch.rand((), generator=generator)
    for step in range(length):
        yield torch.sin(phase + 0.3 * step).view(1) + 0.05 * torch.randn(1, generator=generator)


class Model(torch.nn.Module):
    """Predicts the next value of each lane's signal."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = torch.nn.GRU(1, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, 1)

    def forward(self, batch: StreamBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The squared error, summed over steps that count, and the lanes' hidden state."""
        hidden = hidden * ~batch.reset[None, :, None]  # a lane that starts a stream forgets the one before
        output, hidden = self.rnn(batch.data, hidden)
        error = (self.head(output)[:-1] - batch.data[1:]).square().squeeze(-1)
        return (error * batch.mask[1:]).sum(), hidden.detach()


def join_ranks() -> None:
    """Start torch.distributed, also where torchrun starts the ranks of a node again.

    The store that they meet in may be kept from one attempt to the next, with the addresses of ranks that have ended.
    So each attempt has keys of its own.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, world_size = next(rendezvous("env://"))
    store = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)  # on GPUs "nccl"


def newest(folder: Path) -> Path | None:
    """The last checkpoint that is whole, the same on all ranks; None if there is none."""
    whole = [file.parent for file in folder.glob("*/.metadata")]  # written when all ranks have written theirs
    found = [max(whole, key=lambda path: int(path.name), default=None)]
    dist.broadcast_object_list(found)
    return found[0]


def main() -> None:
    """Join the other ranks, train, and leave them."""
    parser = argparse.ArgumentParser(description="Trains on several ranks with torchrun.")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("ddp_checkpoint"),
        help="a folder of checkpoints; the newest is taken up",
    )
    parser.add_argument("--stop-after", type=int, default=10**9, help="save and leave after this number of batches")
    parser.add_argument("--save-every", type=int, default=10**9, help="save each time after this number of batches")
    parser.add_argument("--virtual-ranks", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()

    join_ranks()
    train(options)  # the model goes with it, before its process group: torch may hang the other way round
    gc.collect()
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """Train for one epoch, or what is left of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    lanes = LANES // world_size
    dataset = StreamDataset(range(SIGNALS), open_signal, lanes, shuffle=True, seed=0, time_steps=16)
    loader = StreamDataLoader(dataset, num_workers=options.workers, virtual_ranks=options.virtual_ranks, timeout=60)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    hidden = {lane: torch.zeros(1, 1, HIDDEN) for lane in range(rank * lanes, (rank + 1) * lanes)}

    def checkpoint() -> dict[str, object]:
        # Each rank saves the state of its own virtual ranks and lanes; loading deals them out again.
        states = {f"lane {lane}": state for lane, state in hidden.items()}
        return {"loader": loader, "model": model.module.state_dict(), "hidden": states}

    if (saved := newest(options.checkpoint)) is not None:
        loaded = checkpoint()
        load(loaded, checkpoint_id=saved)
        model.module.load_state_dict(loaded["model"])

    for number, batch in enumerate(loader, 1):
        state = torch.cat(list(hidden.values()), dim=1)
        loss, state = model(batch, state)
        steps = batch.mask[1:].sum()
        dist.all_reduce(steps)
        optimizer.zero_grad()
        (loss * world_size / steps.clamp(min=1)).backward()  # DDP averages over ranks: now it is a mean over all steps
        optimizer.step()
        hidden = dict(zip(hidden, state.split(1, dim=1), strict=True))

        real = torch.tensor([float(batch.mask.sum()), batch.mask.numel(), loss.detach()])
        checksums: list[list[int]] = [[]] * world_size
        dist.all_gather_object(checksums, [zlib.crc32(lane.numpy().tobytes()) for lane in batch.data.unbind(1)])
        dist.all_reduce(real)
        if rank == 0:
            together = zlib.crc32(repr([c for of_rank in checksums for c in of_rank]).encode())
            print(
                f"batch {batch.batch_index}: {real[0] / real[1]:.0%} of the cells are real, "
                f"loss {real[2] / real[0]:.4f}, "
                f"global batch {together:08x}",
                flush=True,
            )
        if number == options.stop_after or not number % options.save_every:
            save(checkpoint(), checkpoint_id=options.checkpoint / str(batch.batch_index + 1))
        if number == options.stop_after:
            break
    else:
        parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        # one write: ranks print at the same time
        print(f"rank {rank} of {world_size}: done, parameters sum to {parameters.sum():.4f}\n", end="", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
