"""Trains a GRU on batches that workers anywhere in a Ray cluster read.

    pip install '.[ray]'
    python examples/ray_workers.py [--address auto] [--workers 2] [--batches 20]

Without `--address` Ray starts on this machine alone. The second loader goes on from the state of the first, without
any worker: who reads makes no difference.
"""

import argparse
import logging
from collections.abc import Iterator

import ray
import torch

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState

LENGTHS = [(7 * i) % 30 + 3 for i in range(40)]


def open_counter(length: int) -> Iterator[torch.Tensor]:
    """One stream: 0, 1, 2, ... as fractions of its length."""
    for step in range(length):
        yield torch.tensor([step / length])


def new_dataset() -> StreamDataset:
    """With `lengths`, workers find their sources without asking anybody."""
    return StreamDataset(LENGTHS, open_counter, 4, shuffle=True, seed=0, time_steps=8, lengths=LENGTHS)


def main() -> None:
    """Train with workers on Ray, and go on without workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of the cluster, such as auto")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=20)
    args = parser.parse_args()
    ray.init(address=args.address, logging_level=logging.ERROR)
    torch.manual_seed(0)
    loader = StreamDataLoader(
        new_dataset(), args.workers, worker_method="ray", max_restarts=3, ray_remote_args={"num_cpus": 0.5}
    )
    model, states = torch.nn.GRU(1, 8), RecurrentState(batch_dim=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in loader:
        output, hidden = model(batch.data, states.before(batch))
        states.after(batch, hidden)
        loss = ((output.mean(-1) - batch.data[..., 0]).square() * batch.mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if batch.batch_index + 1 == args.batches:
            break
    print(f"{args.workers} workers on Ray: {batch.batch_index + 1} batches, loss {loss.item():.3f}")
    rest = StreamDataLoader(new_dataset())
    rest.load_state_dict(loader.state_dict())
    total = len(rest)  # of this epoch; the next has another order, and number
    print(f"without workers: {sum(1 for _ in rest)} more, of {total} in the epoch")
    ray.shutdown()


if __name__ == "__main__":
    main()
