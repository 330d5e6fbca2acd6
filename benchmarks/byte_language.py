"""Python's own standard library as streams of bytes, and two small recurrent models of it, for `stateful_finish.py`."""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from proof import take_step
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu, softplus

from stream_dataloader import Sections, StreamBatch, StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState, linear_scan
from stream_dataloader.streams import TextStream

TIME_STEPS, LANES = 64, 8
State = Any
Model = Callable[[Tensor, State], tuple[Tensor, State]]


class GRU(nn.Module):
    """Scores of the next byte `(T, B, 256)` from bytes `(T, B)`, and the state `(1, B, features)` after them."""

    batch_dim = 1

    def __init__(self, features: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, features // 4)
        self.gru = nn.GRU(features // 4, features)
        self.head = nn.Linear(features, 256)

    def forward(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        output, state = self.gru(self.embedding(codes), state)
        return self.head(output), state


class Diagonal(nn.Module):
    """A diagonal state-space layer whose time step depends on its input, as in Mamba (arXiv 2312.00752).

    With one number a channel for a state: `h[t] = exp(-dt) * h[t - 1] + dt * u[t]`.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.into = nn.Linear(features, 6 * features)
        self.out = nn.Linear(2 * features, features)
        # as Mamba begins: steps of 0.001 to 0.1, so the state remembers some 10 to 1,000 items
        dt = torch.exp(torch.empty(2 * features).uniform_(math.log(0.001), math.log(0.1)))
        self.step = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, x: Tensor, state: Tensor | None, is_first: Tensor) -> tuple[Tensor, Tensor]:
        u, gate, step = self.into(self.norm(x)).chunk(3, dim=-1)
        dt = softplus(step + self.step)
        h, last = linear_scan(inputs=dt * silu(u), decay=torch.exp(-dt), state=state, is_first=is_first)
        return x + self.out(h * silu(gate)), last


class SSM(nn.Module):
    """The same as `GRU`, of diagonal layers; the state is a list of one `(B, 2 * features)` a layer."""

    batch_dim = 0

    def __init__(self, features: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, features)
        self.layers = nn.ModuleList(Diagonal(features) for _ in range(layers))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, 256)

    def forward(self, codes: Tensor, state: State) -> tuple[Tensor, State]:
        x, states = self.embedding(codes), []
        is_first = torch.zeros(codes.shape, dtype=torch.bool)  # windows are aligned: a stream starts at t = 0 only
        for i, layer in enumerate(self.layers):
            x, last = layer(x, None if state is None else state[i], is_first)
            states.append(last)
        return self.head(self.norm(x)), states


MODELS: dict[str, Callable[[], Any]] = {"GRU": GRU, "diagonal SSM": SSM}


def library(held_out: int, reach: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Python's standard library: files to learn from, as (path, bytes), and some of more than `reach` to test on."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts]
    sized = [(str(file), file.stat().st_size) for file in files if file.stat().st_size > 1]
    long = [path for path, size in sized if size > reach]
    tested = set(random.Random(0).sample(long, held_out))
    return [pair for pair in sized if pair[0] not in tested], sorted(tested)


def training_loader(
    files: list[tuple[str, int]], seed: int, *, shuffle: bool = True, section_steps: int | None = None
) -> StreamDataLoader[StreamBatch]:
    """Endless batches of 8 lanes and 64 bytes, each with the byte that follows."""
    lengths = [size for _, size in files]
    dataset = StreamDataset(
        [path for path, _ in files],
        TextStream(units="bytes", targets=True),
        LANES,
        "cycle",
        seed=seed,
        time_steps=TIME_STEPS,
        shuffle=shuffle,
        lengths=lengths,
        sections=None if section_steps is None else Sections(section_steps, jitter=section_steps > TIME_STEPS),
    )
    return StreamDataLoader(dataset)


class Training:
    """A model in training.

    Args:
        kind: `"GRU"` or `"diagonal SSM"`.
        loader: Its batches.
        seed: Of the weights.
        steps: Of the whole training: the learning rate rises for a twentieth of them, and then falls to a tenth.
    """

    def __init__(self, kind: str, loader: StreamDataLoader[StreamBatch], seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = MODELS[kind]()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=4e-3)
        rise = max(1, steps // 20)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / rise, 1 - 0.9 * (step - rise) / max(1, steps - rise))
        )
        self.loader = loader

    def run(self, steps: int, *, carried: bool) -> None:
        """Go on for so many batches. The state is carried from batch to batch, or nothing at the start of each."""
        carry = RecurrentState(batch_dim=self.model.batch_dim)
        carry.reset()  # begin with nothing, also in mid-stream
        for batch in islice(self.loader, steps):
            scores, state = self.model(batch.data["input"].int(), carry.before(batch) if carried else None)
            if carried:
                carry.after(batch, state)
            target = batch.data["target"][batch.mask]  # the last window of a stream may have room left
            loss = cross_entropy(scores[batch.mask], target)
            take_step(self.model, self.optimizer, loss)
            self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """All that it takes to go on, the loader's place included."""
        parts = (self.model, self.optimizer, self.schedule, self.loader)
        return {type(part).__name__: part.state_dict() for part in parts}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where another one was."""
        for part in (self.model, self.optimizer, self.schedule, self.loader):
            part.load_state_dict(saved[type(part).__name__])


@torch.no_grad()
def loss_by_position(model: Any, paths: list[str], reach: int, *, carried: bool) -> Tensor:
    """The mean over files of the loss in nats a byte, `(reach,)`, at each place of a stream."""
    dataset = StreamDataset(
        [(path, 0, reach + 1) for path in paths],
        TextStream(units="bytes", targets=True),
        len(paths),
        time_steps=TIME_STEPS,
    )
    carry, found = RecurrentState(batch_dim=model.batch_dim), []
    for batch in StreamDataLoader(dataset):
        scores, state = model(batch.data["input"].int(), carry.before(batch) if carried else None)
        carry.after(batch, state)
        found.append(cross_entropy(scores.movedim(-1, 1), batch.data["target"], reduction="none").mean(1))
    return torch.cat(found)[:reach]
