"""Trains with Accelerate: gradients are accumulated, and a run that was interrupted goes on at the very next batch.

    python examples/accelerate_loop.py [--epochs 2] [--stop-after 6] [--workers 1]
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Three runs: one whole, one that is left in the middle of an epoch, and one that goes on from its checkpoint. The losses
of the last two are those of the first. Each rank reads lanes of its own, and carries their states.
"""

import argparse
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from byte_model import TEXTS, ByteGRU, text_loader

from stream_dataloader.integrations.accelerate import prepare
from stream_dataloader.recurrent import RecurrentState

ACCUMULATED = 4  # batches for one step of the optimizer


def train(options: argparse.Namespace, folder: str, *, stop: bool = False, resume: bool = False) -> list[float]:
    """Train, and return the loss of each batch."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATED)
    set_seed(0)
    model, carry = ByteGRU(), RecurrentState(batch_dim=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = prepare(accelerator, text_loader(TEXTS, options.workers), carry=carry)  # the one line for streams
    if resume:
        accelerator.load_state(folder)
    losses: list[float] = []
    for _ in range(loader.epoch, options.epochs):  # the epoch to go on with
        for batch in loader:
            with accelerator.accumulate(model):  # the last batches of an epoch count, also if they are fewer
                loss, _, hidden = model(**batch.data, hidden=carry.before(batch))
                carry.after(batch, hidden)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            # gradients are not saved, so a checkpoint comes after a step of the optimizer
            if stop and len(losses) >= options.stop_after and accelerator.sync_gradients:
                accelerator.save_state(folder)
                return losses
    return losses


def main() -> None:
    """Train whole, interrupted and resumed; compare the losses."""
    parser = argparse.ArgumentParser(description="Trains a GRU with Accelerate, interrupted and resumed.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop-after", type=int, default=6, help="batches after which the second run is left")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        Accelerator(cpu=not torch.cuda.is_available())  # the ranks meet
        (folder,) = broadcast_object_list([own])  # that of the first rank
        whole = train(options, folder)
        head = train(options, folder, stop=True)
        tail = train(options, folder, resume=True)
    same = head + tail == whole
    lines = (
        f"whole run: {len(whole)} batches, loss {whole[0]:.3f} to {whole[-1]:.3f}",
        f"left after {len(head)} batches, {len(tail)} after the resume",
        f"the same losses: {same}",
    )
    print("".join(f"{line}\n" for line in lines), end="", flush=True)  # one write: ranks print at the same time
    assert same


if __name__ == "__main__":
    main()
