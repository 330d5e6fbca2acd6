"""The one file to copy: trains a recurrent model on videos or texts, and resumes exactly where it was stopped.

    python examples/train.py [FILE ...] [--text] [--save-every 20]
    torchrun --standalone --nproc-per-node 2 examples/train.py

Without files it draws a dozen clips, or with `--text` reads modules of Python's library. After Ctrl-C or `kill -9`, run
the same command again: it continues with the next batch, and ends with the weights of an uninterrupted run.
"""

import argparse
import gc
import importlib.util
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset, merge_states
from stream_dataloader.cli.demo import default_clips
from stream_dataloader.recurrent import RecurrentState
from stream_dataloader.streams import TextStream, VideoStream

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    """Put yours here. This one predicts each time step, and returns the losses, `(T, B)`, and its state."""

    def __init__(self, *, text: bool, features: int = 128) -> None:
        super().__init__()
        self.text, values = text, 256 if text else 3 * 24 * 32
        self.encode = nn.Embedding(values, features) if text else nn.Linear(values, features)
        self.rnn, self.head = nn.GRU(features, features), nn.Linear(features, values)

    def forward(self, data: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x = data.long() if self.text else data.flatten(2) / 255
        output, after = self.rnn(self.encode(x), state)
        before = torch.zeros_like(after) if state is None else state  # the window before predicts the first step
        guess = self.head(torch.cat([before, output[:-1]]))
        if self.text:
            return nn.functional.cross_entropy(guess.movedim(-1, 1), x, reduction="none"), after
        return (guess - x).square().mean(-1), after


def loader_of(options: argparse.Namespace, *, train: bool) -> StreamDataLoader[StreamBatch]:
    """Put your data here. One file of five validates, the others train. Each rank has its share of the lanes."""
    given = Path(os.__file__).parent.glob("email/mime/[!_]*.py") if options.text else default_clips()
    files = [file for number, file in enumerate(sorted(options.files or given)) if (number % 5 != 2) == train]
    open_stream = TextStream(units="bytes") if options.text else VideoStream(size=(24, 32))
    lanes, time_steps = max(1, min(options.lanes, len(files)) // WORLD_SIZE), 64 if options.text else 16
    dataset = StreamDataset(files, open_stream, lanes, time_steps=time_steps, shuffle=train, seed=0, on_error="skip")
    return StreamDataLoader(dataset, options.workers, device=DEVICE)


def summed(*values: float) -> list[float]:
    """The sum of each value over all ranks."""
    totals = torch.tensor(values, dtype=torch.float64)
    if WORLD_SIZE > 1:
        dist.all_reduce(totals)
    return [float(total) for total in totals]


def main() -> None:
    """Train from the checkpoint, if there is one, to the end of the last epoch."""
    parser = argparse.ArgumentParser(description="Trains on videos or texts, and resumes where it was stopped.")
    parser.add_argument("files", nargs="*", help="videos, or texts")
    parser.add_argument("--text", action="store_true", help="the files are texts")
    for name, value in {"folder": Path("runs/train"), "epochs": 3, "lanes": 4, "workers": 2, "save-every": 20}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    signals: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: signals.append(number))  # Ctrl-C: save and stop after this step
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl")
    torch.set_num_threads(1)  # more of them slow such a small model down
    torch.manual_seed(0)
    loader, validation = loader_of(options, train=True), loader_of(options, train=False)
    model, carry = Model(text=options.text).to(DEVICE), RecurrentState(batch_dim=1)
    wrapped = nn.parallel.DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    path, step, board = options.folder / "checkpoint.pt", 0, None
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        step, ranks = saved["step"], saved["ranks"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(merge_states([own["loader"] for own in ranks]))
        carry.load_state_dict(merge_states([own["carry"] for own in ranks]))
        tqdm.write(f"{path}: step {step}, epoch {loader.epoch} of {options.epochs}")
    if RANK == 0 and importlib.util.find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(options.folder), purge_step=step + 1)

    def report(name: str, loss: float) -> None:
        if RANK == 0:
            tqdm.write(f"step {step}: {name} loss {loss:.6f}")
        if board is not None:
            board.add_scalar(f"loss/{name}", loss, step)

    def save() -> None:
        ranks = [{"loader": loader.state_dict(), "carry": carry.state_dict()}] * WORLD_SIZE
        if WORLD_SIZE > 1:
            dist.all_gather_object(ranks, ranks[0])
        if RANK == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "ranks": ranks}
            with path.with_suffix(".new").open("wb") as file:
                torch.save(state, file)
                os.fsync(file.fileno())
            path.with_suffix(".new").replace(path)  # a kill leaves the old checkpoint or the new one, whole

    for epoch in range(loader.epoch, options.epochs):
        for batch in loader.progress(desc=f"epoch {epoch}", leave=False):
            torch.manual_seed(step * WORLD_SIZE + RANK)  # dropout, say, draws the same after a resume
            losses, state = wrapped(batch.data, carry.before(batch))
            carry.after(batch, state)
            real, stop = summed(float(batch.host.mask.sum()), len(signals))
            loss = (losses * batch.mask).sum() * WORLD_SIZE / real  # DDP takes the mean over ranks
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if stop or step % options.save_every == 0:
                save()
                report("training", summed(loss.item())[0] / WORLD_SIZE)
            if stop:
                raise SystemExit(f"stopped after step {step}; run the same command to continue")
        model.eval()
        reading, sums = RecurrentState(batch_dim=1), torch.zeros(2, device=DEVICE)
        for batch in validation:
            losses, state = torch.no_grad()(model)(batch.data, reading.before(batch))
            reading.after(batch, state)
            sums += torch.stack([(losses * batch.mask).sum(), batch.mask.sum()])
        total, real = summed(*sums.tolist())
        report("validation", total / real)
        model.train()
    save()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        gc.collect()  # the wrapped model goes before its process group
        dist.destroy_process_group()
