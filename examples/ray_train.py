"""Trains a GRU with Ray Train, whose workers are the ranks: the loader asks torch.distributed.

    pip install '.[ray]'
    python examples/ray_train.py [--ranks 2] [--epochs 2] [--break-in-epoch 1]

Each rank saves its loader's own state in the checkpoint that all of them report. After a failure Ray starts the ranks
anew, which go on from there.
"""

import argparse
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchTrainer, prepare_model

from stream_dataloader import StreamDataLoader, StreamDataset


def open_counter(length: int) -> Iterator[torch.Tensor]:
    """One stream: 0, 1, 2, ... as fractions of its length."""
    for step in range(length):
        yield torch.tensor([step / length])


def train(config: dict[str, Any]) -> None:
    """The program of each worker."""
    torch.manual_seed(0)
    lengths = [(7 * i) % 30 + 3 for i in range(40)]  # uneven, and yet all ranks have the same number of batches
    loader = StreamDataLoader(
        StreamDataset(lengths, open_counter, 4, shuffle=True, seed=0, time_steps=8), num_workers=1
    )
    model = prepare_model(torch.nn.GRU(1, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rank, first = get_context().get_world_rank(), 0
    if (checkpoint := get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            model.load_state_dict(torch.load(Path(folder, "model.pt"), weights_only=True))
            loader.load_state_dict(torch.load(Path(folder, f"loader_{rank}.pt"), weights_only=True))
        first = loader.state_dict()["epoch"]
        print(f"rank {rank} goes on with epoch {first}", flush=True)
    for epoch in range(first, config["epochs"]):
        if epoch == config["break_in_epoch"] and checkpoint is None and rank == 0:
            raise RuntimeError("broken on purpose")
        hidden, batches, items = torch.zeros(1, 4, 8), 0, 0
        for batch in loader:
            output, hidden = model(batch.data, hidden * ~batch.reset[None, :, None])
            hidden = hidden.detach()
            loss = ((output.mean(-1) - batch.data[..., 0]).square() * batch.mask).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batches, items = batches + 1, items + int(batch.mask.sum())
        print(f"epoch {epoch}, rank {rank}: {batches} batches, {items} items", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(loader.state_dict(), Path(folder, f"loader_{rank}.pt"))
            if rank == 0:
                torch.save(model.state_dict(), Path(folder, "model.pt"))
            report({"batches": batches, "items": items}, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    """Train on the ranks of a local Ray."""
    parser = argparse.ArgumentParser(description="Trains with Ray Train.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--break-in-epoch", type=int, default=1, help="where rank 0 fails, once")
    options = parser.parse_args()
    ray.init(num_cpus=options.ranks + 1, include_dashboard=False, logging_level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": options.epochs, "break_in_epoch": options.break_in_epoch},
            scaling_config=ScalingConfig(num_workers=options.ranks, use_gpu=False),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        )
        result = trainer.fit()
    assert result.metrics is not None
    print(f"done: {result.metrics['batches']} batches in the last epoch")
    ray.shutdown()


if __name__ == "__main__":
    main()
