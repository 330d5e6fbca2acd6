"""Trains with Hugging Face's `Trainer`: a run that was interrupted goes on at the very next batch.

    python examples/hf_trainer.py [--epochs 2] [--stop-after 6] [--workers 1]

Three runs: one whole, one that is stopped in the middle of an epoch, and one that goes on from its checkpoint. The
losses of the last two are those of the first. Each epoch ends with an evaluation.
"""

import argparse
import tempfile
from typing import Any

import torch
from byte_model import TEXTS, ByteGRU, text_loader
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from stream_dataloader.integrations.transformers import StreamTrainer
from stream_dataloader.recurrent import RecurrentState


class Stop(TrainerCallback):
    """Saves a checkpoint after some steps, and ends training there."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """See whether it is time."""
        if state.global_step == self._after:
            control.should_save = control.should_training_stop = True


class CarryingTrainer(StreamTrainer):
    """Calls the model with the state of each lane."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.carry = RecurrentState(batch_dim=1)
        self.aside = RecurrentState(batch_dim=1)  # an evaluation in the middle of training reads other streams
        super().__init__(*args, carry=self.carry, **kwargs)  # checkpoints hold that of training

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """The loss of a batch."""
        batch = inputs["batch"]
        carry = self.carry if model.training else self.aside
        loss, scores, hidden = model(**batch.data, hidden=carry.before(batch))
        carry.after(batch, hidden)
        return (loss, {"logits": scores}) if return_outputs else loss


def train(options: argparse.Namespace, folder: str, *, stop: bool = False, resume: bool = False) -> list[float]:
    """Train, and return the loss of each step of the optimizer."""
    args = TrainingArguments(
        folder,
        num_train_epochs=options.epochs,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        eval_strategy="epoch",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    set_seed(0)
    trainer = CarryingTrainer(
        ByteGRU(),
        args,
        train_dataset=text_loader(TEXTS[:24], options.workers),
        eval_dataset=text_loader(TEXTS[24:], shuffle=False),
        model_inputs=lambda batch: {"batch": batch, "labels": batch.data["labels"]},
        callbacks=[Stop(options.stop_after)] if stop else [],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            print(f"  epoch {entry['epoch']:.0f}: evaluation's loss {entry['eval_loss']:.3f}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Train whole, interrupted and resumed; compare the losses."""
    parser = argparse.ArgumentParser(description="Trains a GRU with the Trainer, interrupted and resumed.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop-after", type=int, default=6, help="steps after which the second run is stopped")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("whole run")
        whole = train(options, folder)
        print("stopped run")
        head = train(options, folder, stop=True)
        print("resumed run")
        resumed = train(options, folder, resume=True)  # the Trainer keeps the losses from before, too
    print(f"{len(whole)} steps, loss {whole[0]:.3f} to {whole[-1]:.3f}; stopped after {len(head)}")
    same = head == whole[: len(head)] and resumed == whole
    print(f"the same losses: {same}")
    assert same


if __name__ == "__main__":
    main()
