"""Runs the guide's recipe for mmengine: trains, goes on from checkpoints in the middle, and compares the batches."""

import logging
import pathlib
import re
import sys
import warnings

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import Dataset

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "map-style.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
(RECIPE,) = (block for block in BLOCKS if "LaneResume" in block and "import" in block)
(CONFIG,) = (block.split("# after\n")[1] for block in BLOCKS if "# after\n" in block)
LOOPS = {  # the loop, the number of batches of an epoch, how often a checkpoint is saved, and those to go on from
    "iterations": ({"type": "IterBasedTrainLoop", "max_iters": 12}, 12, {"by_epoch": False, "interval": 5}, [5, 10]),
    "several epochs": ({"type": "IterBasedTrainLoop", "max_iters": 9}, 4, {"by_epoch": False, "interval": 2}, [4, 6]),
    "epochs": ({"type": "EpochBasedTrainLoop", "max_epochs": 3}, 5, {"by_epoch": True, "interval": 1}, [5, 10]),
    "in epochs": ({"type": "EpochBasedTrainLoop", "max_epochs": 3}, 5, {"by_epoch": False, "interval": 7}, [7, 14]),
}


class Frames(Dataset):
    flag = [0] * 5 + [1] * 8 + [2] * 3 + [3] * 6

    def __len__(self):
        return len(self.flag)

    def __getitem__(self, index):
        return {"frame": torch.tensor(int(index)), "start": torch.tensor(index.is_first)}


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, frame, start, mode="loss"):
        self.seen.append([*map(int, frame), *map(bool, start)])
        return {"loss": self.layer(torch.stack(list(frame)).float()[:, None] / 22).mean()}


def train(name, folder, checkpoint=None):
    loop, batches, saving, _ = LOOPS[name]
    exec(CONFIG, names := {"dataset": Frames(), "n": batches})
    model = Model()
    Runner(
        model,
        str(folder),
        train_dataloader=names["train_dataloader"],
        custom_hooks=names["custom_hooks"],
        train_cfg=loop,
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
        default_hooks={"checkpoint": {"type": "CheckpointHook", **saving}},
        load_from=checkpoint,
        resume=checkpoint is not None,
        log_level="ERROR",
        experiment_name=f"{name} {checkpoint}",
    ).train()
    return model.seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    exec(RECIPE, {})
    for name in LOOPS:
        folder = pathlib.Path(sys.argv[1], name)
        whole = train(name, folder)
        for batches in LOOPS[name][3]:
            number = batches // LOOPS[name][1] if name == "epochs" else batches
            (saved,) = folder.glob(f"*_{number}.pth")
            rest = train(name, folder, str(saved))
            assert rest == whole[batches:], (name, batches, rest, whole)
        sys.stdout.write(f"{name} ok\n")
