"""Lightning: checkpoints during an epoch that continue at the very next batch.

Lightning saves and loads the state of loaders that have one. If it cannot know the number of batches, it fetches one
batch ahead of the one that it trains on, so the state that it saves is one batch too far.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from stream_dataloader._state.plain import merge_states
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader

__all__ = ["ExactResume"]


class ExactResume(Callback):
    """Saves the state as of the last batch trained on in checkpoints, not as of the last batch fetched.

    It works for one training `StreamDataLoader` that yields `StreamBatch`es, alone or among others. On one rank,
    loaders whose dataset has `lengths`, and no `padding_mode="cycle"`, resume exactly without it. On several ranks it
    also gathers the states of all ranks, of which Lightning saves only one.

    Example::

        Trainer(callbacks=[ExactResume(), ModelCheckpoint(every_n_train_steps=100)])
    """

    def __init__(self) -> None:
        self._batch: StreamBatch | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Remember the batch that is trained on."""
        self._batch = batch if isinstance(batch, StreamBatch) else None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """The epoch is over: the loader's own state is right."""
        self._batch = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Put the state as of that batch in place of the loader's own; with several ranks, all ranks' together."""
        states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
        combined = trainer.fit_loop._combined_loader
        if not states or combined is None:
            return
        stateful = [loader for loader in combined.flattened if hasattr(loader, "state_dict")]
        for i, loader in enumerate(stateful):
            if isinstance(loader, StreamDataLoader):
                state = states[i] if self._batch is None else self._batch.state_dict()
                states[i] = _of_all_ranks(state) if trainer.world_size > 1 else state


def _of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """The whole of which each rank has a part; only one rank writes checkpoints."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    return merge_states(gathered)
