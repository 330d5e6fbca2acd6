"""Trains with Lightning: a run that was interrupted goes on at the very next batch, with the state of each lane.

    python examples/lightning_module.py [--epochs 2] [--stop-after 9] [--workers 1] [--ranks 1]

Three runs: one whole, one that is stopped in the middle of an epoch, and one that goes on from its checkpoint. The
losses of the last two are those of the first. Each rank reads lanes of its own, and carries their states.
"""

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byte_model import TEXTS, ByteGRU, text_loader
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from stream_dataloader import StreamBatch
from stream_dataloader.integrations.lightning import StreamEpochs
from stream_dataloader.recurrent import RecurrentState


class ByteModule(LightningModule):  # type: ignore[misc, unused-ignore]
    """Trains a `ByteGRU`, whose state goes on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ByteGRU()
        self.carry = RecurrentState(batch_dim=1)
        self.random: torch.Tensor | None = None  # of a checkpoint
        self.losses: list[float] = []

    def training_step(self, batch: StreamBatch, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """The loss of a batch."""
        loss: torch.Tensor
        loss, _, hidden = self.model(**batch.data, hidden=self.carry.before(batch))
        self.carry.after(batch, hidden)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the random numbers for dropout, which each rank has of its own. All ranks call it."""
        own = torch.get_rng_state()
        checkpoint["random"] = [own] * self.trainer.world_size
        if self.trainer.world_size > 1:
            dist.all_gather_object(checkpoint["random"], own)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take this rank's random numbers from it."""
        self.random = checkpoint["random"][self.trainer.global_rank]

    def on_train_start(self) -> None:
        """Go on with the random numbers, which Lightning does not save."""
        if self.random is not None:
            torch.set_rng_state(self.random)


def train(options: argparse.Namespace, folder: str, *, stop: bool = False, resume: bool = False) -> list[float]:
    """Train, and return the loss of each batch of this rank."""
    seed_everything(0, verbose=False)
    module = ByteModule()
    trainer = Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=DDPStrategy(process_group_backend="gloo") if options.ranks > 1 else "auto",
        max_epochs=options.epochs,
        max_steps=options.stop_after if stop else -1,
        callbacks=[
            StreamEpochs(carry=module.carry),
            ModelCheckpoint(folder, "stopped", every_n_train_steps=options.stop_after),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = text_loader(TEXTS, options.workers)
    trainer.fit(module, loader, ckpt_path=str(Path(folder, "stopped.ckpt")) if resume else None)
    return module.losses


def main() -> None:
    """Train whole, interrupted and resumed; compare the losses."""
    parser = argparse.ArgumentParser(description="Trains a GRU with Lightning, interrupted and resumed.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop-after", type=int, default=9, help="steps after which the second run is stopped")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # Lightning counts cores, not lanes
    with tempfile.TemporaryDirectory() as own:
        folder = os.environ.setdefault("CHECKPOINT_FOLDER", own)  # Lightning starts the other ranks with it
        whole = train(options, f"{folder}/whole")
        head = train(options, folder, stop=True)
        tail = train(options, folder, resume=True)
    same = head + tail == whole
    lines = (
        f"whole run: {len(whole)} batches, loss {whole[0]:.3f} to {whole[-1]:.3f}",
        f"stopped after {len(head)} batches, {len(tail)} after the resume",
        f"the same losses: {same}",
    )
    print("".join(f"{line}\n" for line in lines), end="", flush=True)  # one write: ranks print at the same time
    assert same


if __name__ == "__main__":
    main()
