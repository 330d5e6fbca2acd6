"""Recognises words as they are spoken: a network whose state is carried, against one that begins anew each window.

    python examples/speech.py [--workers 2] [--epochs 6]

Sessions are made up. A speaker of unknown pitch greets, then says words, which differ by how far they lie above or
below that greeting. Nobody says it again, so who forgets the greeting can only guess. A session has hundreds of frames
and a window `TIME_STEPS`: a streaming recogniser carries its state over windows, in training as it will in use.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState

TIME_STEPS, LANES = 16, 16
BINS = 32  # of the spectrum
WORDS = np.array([-6, -3, 3, 6])  # bins from the greeting to a word
SILENCE, GREETING = 0, 1  # classes; words follow
CLASSES = 2 + len(WORDS)


def frame(pitch: float | None, rng: np.random.Generator) -> Any:
    """A spectrum with noise, and a peak at the pitch of what is said, if anything is."""
    spectrum = rng.normal(0, 0.3, BINS)
    if pitch is not None:
        spectrum += 2 * np.exp(-((np.arange(BINS) - pitch) ** 2) / 2)
    return spectrum.astype(np.float32)


def listen(session: int) -> Iterator[dict[str, Any]]:
    """One session: each time step is a frame, and the class of what is said in it."""
    rng = np.random.default_rng(session)
    voice = rng.uniform(8, BINS - 8)
    said = [GREETING, *(2 + rng.integers(len(WORDS), size=rng.integers(10, 25)))]
    for number in said:
        pitch = voice + (0 if number == GREETING else WORDS[number - 2])
        for _ in range(rng.integers(5, 9)):
            yield {"frame": frame(pitch + rng.normal(0, 0.2), rng), "said": int(number)}
        for _ in range(rng.integers(2, 6)):
            yield {"frame": frame(None, rng), "said": SILENCE}


class Recogniser(nn.Module):
    """Tells the class of each frame from it and those before it."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(BINS, features), nn.ReLU())
        self.memory = nn.GRU(features, features)
        self.head = nn.Linear(features, CLASSES)

    def forward(self, frames: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores `(T, B, classes)` for frames `(T, B, bins)`, and the state behind them."""
        features, state = self.memory(self.encode(frames), state)
        return self.head(features), state


def read(sessions: range, workers: int) -> StreamDataLoader:
    """The loader: a lane hears one session after another."""
    dataset = StreamDataset(sessions, listen, LANES, time_steps=TIME_STEPS, shuffle=True, seed=0)
    return StreamDataLoader(dataset, workers, persistent_workers=workers > 0)


def run(model: Recogniser, loader: StreamDataLoader, optimizer: Any = None, *, carries: bool) -> float:
    """One epoch; returns the share of words' frames that are recognised."""
    carry, right, words = RecurrentState(batch_dim=1), 0, 0
    for batch in loader:
        scores, state = model(batch.data["frame"], carry.before(batch) if carries else None)
        if carries:
            carry.after(batch, state)
        scores, said = scores[batch.mask], batch.data["said"][batch.mask]
        if optimizer is not None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, said).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        is_word = said > GREETING
        words += int(is_word.sum())
        right += int((scores.argmax(-1) == said)[is_word].sum())
    return right / words


def main() -> None:
    """Train each way, and try the network on sessions that it has not heard."""
    parser = argparse.ArgumentParser(description="Recognises words as they are spoken.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--sessions", type=int, default=400)
    given = parser.parse_args()
    for kind, carries in (("begins anew each window", False), ("carries its state", True)):
        torch.manual_seed(0)
        model = Recogniser()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        heard = read(range(given.sessions), given.workers)
        for _ in range(given.epochs):
            run(model, heard, optimizer, carries=carries)
        with torch.no_grad():
            share = run(model, read(range(10**6, 10**6 + 60), 0), carries=carries)
        print(f"{kind}: {share:.0%} of the words' frames are right", flush=True)


if __name__ == "__main__":
    main()
