"""Shared by the examples of trainers: Python's documentation as streams of bytes, and a GRU whose state is carried.

    python examples/byte_model.py

By itself it shows a few batches and what the model makes of them. See `accelerate_loop.py`,
`lightning_module.py` and `hf_trainer.py`.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState

LANES = 8
PADDED = -100  # the label that torch's cross entropy leaves out

TEXTS = [text.encode()[:300] for text in list(topics.values())[:30]]


def open_text(text: bytes) -> Iterator[dict[str, int]]:
    """One stream: each time step is a byte, and the one after it to predict."""
    for now, following in pairwise(text):
        yield {"input_ids": now, "labels": following}


def text_loader(texts: list[bytes], num_workers: int = 0, *, shuffle: bool = True) -> StreamDataLoader[StreamBatch]:
    """Batches of 8 lanes and 32 time steps; each lane goes on from batch to batch."""
    dataset = StreamDataset(
        texts,
        open_text,
        batch_size=LANES,
        time_steps=32,
        shuffle=shuffle,
        seed=0,
        fill_value={"labels": PADDED},
        lengths=[len(text) - 1 for text in texts],  # so that the number of batches is known
    )
    return StreamDataLoader(dataset, num_workers)


class ByteGRU(nn.Module):
    """Predicts the next byte. Its state is an argument and a result, so that the training loop carries it.

    Args:
        features: Size of the state.
    """

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, features)
        self.gru = nn.GRU(features, features)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(features, 256)

    def forward(self, input_ids: Tensor, labels: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the scores `(T, B, 256)` of bytes `(T, B)`, and the state `(1, B, features)` after them."""
        features, hidden = self.gru(self.embedding(input_ids), hidden)
        scores = self.head(self.dropout(features))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=PADDED)
        return loss, scores, hidden


def main() -> None:
    """Show a few batches, and the loss of a model that has learned nothing."""
    torch.manual_seed(0)
    model, carry = ByteGRU(), RecurrentState(batch_dim=1)
    for batch in islice(text_loader(TEXTS), 3):
        loss, _, hidden = model(**batch.data, hidden=carry.before(batch))
        carry.after(batch, hidden)
        start = bytes(batch.data["input_ids"][:, 0].tolist()).decode(errors="replace")
        print(f"batch {batch.batch_index}: loss {loss:.3f}, lane 0 reads {start!r}")


if __name__ == "__main__":
    main()
