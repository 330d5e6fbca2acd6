"""Trains one GRU for each worker on the parts that worker reads, hidden state carried from part to part.

    python examples/per_worker_rnn.py [--workers 2] [--steps 120]

`loader.parts()` does not put the workers' lanes side by side: each part is one worker's, and says so. That
suits a model (or a copy of one on its own device) for each worker. The task is to predict the next character of
Python's documentation.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset

CHARACTERS = 128


def open_text(text: str) -> Iterator[tuple[int, int]]:
    """One stream: each time step is a character, and the one after it to predict."""
    for now, following in pairwise(text):
        yield min(ord(now), CHARACTERS - 1), min(ord(following), CHARACTERS - 1)


class CharacterGRU(nn.Module):
    """Predicts the next character; keeps the hidden state of its lanes from call to call."""

    def __init__(self, lanes: int, features: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, features)
        self.gru = nn.GRU(features, features)
        self.head = nn.Linear(features, CHARACTERS)
        self.hidden = torch.zeros(1, lanes, features)

    def forward(self, characters: Tensor, reset: Tensor) -> Tensor:
        """Scores `(T, B, characters)` for characters `(T, B)`; `reset` is `(B,)`."""
        # A lane that starts a new text must know nothing of the one before. Windows are aligned, so texts start
        # at t = 0 only, and zeroing here is enough; with packed ones `is_first` says where else to.
        hidden = self.hidden.masked_fill(reset[:, None], 0.0)
        features, hidden = self.gru(self.embedding(characters), hidden)
        # The value goes on to the next window, the gradient does not: truncated back-propagation through time.
        self.hidden = hidden.detach()
        scores: Tensor = self.head(features)
        return scores


def train_step(model: CharacterGRU, optimizer: torch.optim.Optimizer, part: StreamBatch) -> float:
    """One step on one worker's part; returns the loss."""
    characters, following = part.data  # the structure that the stream yields, each leaf (T, B)
    scores = model(characters, part.reset)
    loss = nn.functional.cross_entropy(scores[part.mask], following[part.mask])  # padding has nothing to teach
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def main() -> None:
    """Train, and print each worker's loss as it goes down."""
    parser = argparse.ArgumentParser(description="Trains a GRU for each worker.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()

    torch.manual_seed(0)
    dataset = StreamDataset(
        list(topics.values()), open_text, batch_size=16, time_steps=32, windows="aligned", shuffle=True
    )
    loader = StreamDataLoader(dataset, num_workers=options.workers)
    models: dict[int, CharacterGRU] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}
    losses = defaultdict[int, list[float]](list)
    for part in islice(loader.parts(), options.steps * max(1, options.workers)):
        worker = part.worker
        if worker not in models:
            models[worker] = CharacterGRU(lanes=len(part))  # a worker's lanes never change, so its state fits
            optimizers[worker] = torch.optim.Adam(models[worker].parameters(), lr=5e-3)
        losses[worker].append(train_step(models[worker], optimizers[worker], part))
        if len(losses[worker]) % 20 == 0:
            recent = sum(losses[worker][-20:]) / 20
            print(f"step {part.batch_index + 1:3d}, worker {worker}: loss {recent:.3f}")


if __name__ == "__main__":
    main()
