"""Imitates a robot that has to remember: a recurrent policy with carried state, against two without.

    python examples/robot_policy.py [--workers 2] [--epochs 20]
    python examples/robot_policy.py --data demos.hdf5 --names robomimic

A lamp shows for a moment on which side the goal is. The arm then goes up to a fork, which takes longer than a window of
`TIME_STEPS`, and has to turn to that side. A policy that sees one step, or the last four, can only guess. One whose
state is carried from window to window knows. It is behaviour cloning with a recurrent network, as BC-RNN of robomimic
(Mandlekar and others, What Matters in Learning from Offline Human Demonstrations, CoRL 2021, arXiv 2108.03298).

With `--data` it trains on demonstrations of your own, whose entries have the names of robomimic, LIBERO or LeRobot.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset, stores
from stream_dataloader.recurrent import RecurrentState

TIME_STEPS, LANES = 16, 16
LAMP_STEPS = 8  # how long the lamp shows the side
SPEED = 0.04  # of the arm, a step
STACKED = 4  # steps that the stacked policy sees

#: What a policy sees, and what it does, as data sets call it.
NAMES = {
    "robomimic": (["obs/robot0_eef_pos", "obs/object"], "actions"),
    "libero": (["obs/ee_states", "obs/gripper_states", "obs/joint_states"], "actions"),
    "lerobot": (["observation.state"], "action"),
}


class World:
    """The arm and the lamp; `act` moves the arm."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.side = float(rng.choice([-1, 1]))
        self.place = np.array([0.0, rng.uniform(-0.3, 0.0)])
        self.steps = 0

    def seen(self) -> dict[str, Any]:
        lamp = self.side if self.steps < LAMP_STEPS else 0.0
        return {"robot0_eef_pos": np.float32(self.place), "object": np.array([lamp], np.float32)}

    def act(self, action: Any) -> None:
        self.place = self.place + SPEED * np.clip(action, -1, 1)
        self.steps += 1

    @property
    def over(self) -> bool:
        return abs(self.place[0]) > 0.3 or self.steps == 100


def demonstrate(number: int) -> Iterator[dict[str, Any]]:
    """Observations and actions of an expert: up to the fork, then to the side."""
    rng = np.random.default_rng(number)
    world = World(rng)
    while not world.over:
        action = np.array([0, 1] if world.place[1] < 1 else [world.side, 0], np.float32)
        yield {"obs": world.seen(), "actions": action}
        world.act(action + rng.normal(0, 0.1, 2))


class Policy(nn.Module):
    """Layers over what is seen, and a GRU between them if it is to remember."""

    def __init__(self, seen: int, actions: int, *, remembers: bool, hidden: int = 64) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(seen, hidden), nn.ReLU())
        self.memory = nn.GRU(hidden, hidden) if remembers else None
        self.act = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, actions))

    def forward(self, seen: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Actions `(T, B, A)` for what is seen, `(T, B, S)`, and the state, `(1, B, H)`."""
        features = self.encode(seen)
        if self.memory is not None:
            features, state = self.memory(features, state)
        return self.act(features), state


def entry(data: Any, name: str) -> Tensor:
    """An entry of a batch, by its name; what a window has of each step is laid end to end."""
    for key in [name] if name in data else name.split("/"):
        data = data[key]
    found: Tensor = data.float()
    return found.flatten(2)


def see(batch: StreamBatch, names: list[str]) -> Tensor:
    """The part of a batch that a policy sees."""
    return torch.cat([entry(batch.data, name) for name in names], -1)


def train(path: Path, names: str, workers: int, epochs: int, *, remembers: bool, stacked: bool = False) -> Policy:
    """Train a new policy, and print the loss of the last epoch."""
    torch.manual_seed(0)
    seen, acts = NAMES[names]
    deltas = {name: range(1 - STACKED, 1) for name in seen} if stacked else None
    sources, open_demo = stores.open(path, deltas=deltas)
    lanes = min(LANES, len(sources))
    dataset = StreamDataset(sources, open_demo, lanes, time_steps=TIME_STEPS, shuffle=True, seed=0)
    loader = StreamDataLoader(dataset, workers)
    first = next(iter(StreamDataLoader(dataset)))  # for its shapes
    policy = Policy(see(first, seen).shape[-1], entry(first.data, acts).shape[-1], remembers=remembers)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    carry = RecurrentState(batch_dim=1)
    for _ in range(epochs):
        losses = []
        for batch in loader:
            actions, state = policy(see(batch, seen), carry.before(batch) if remembers else None)
            if remembers:
                carry.after(batch, state)
            loss = (actions - entry(batch.data, acts))[batch.mask].square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    print(f"loss {np.mean(losses):.4f}", end="")
    return policy


@torch.no_grad()
def success(policy: Policy, trials: int, *, stacked: bool) -> float:
    """In how many of the trials the arm ends on the lamp's side."""
    wins = 0
    for trial in range(trials):
        world, state, past = World(np.random.default_rng(10_000 + trial)), None, []
        while not world.over:
            past.append(world.seen())
            rows = [past[max(0, len(past) - 1 - back)] for back in (reversed(range(STACKED)) if stacked else (0,))]
            seen = np.concatenate([row[name] for name in ("robot0_eef_pos", "object") for row in rows])
            action, state = policy(torch.from_numpy(seen)[None, None], state)
            world.act(action[0, 0].numpy())
        wins += world.place[0] * world.side > 0.3
    return wins / trials


def main() -> None:
    """Train each kind of policy, and have it act."""
    parser = argparse.ArgumentParser(description="Imitates a robot that has to remember.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--demos", type=int, default=200)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--data", type=Path, help="demonstrations of your own (default: made-up ones)")
    parser.add_argument("--names", choices=NAMES, default="robomimic", help="whose names its entries have")
    given = parser.parse_args()
    kinds = {
        "sees one step": {"remembers": False},
        f"sees {STACKED} steps": {"remembers": False, "stacked": True},
        "carries its state": {"remembers": True},
    }
    with TemporaryDirectory() as folder:
        path = given.data or Path(folder) / "demos.store"
        if given.data is None:
            report = stores.pack((list(range(given.demos)), demonstrate), path, progress=False)
            print(f"{report.streams} demonstrations, {report.steps} steps:")
        for kind, options in kinds.items():
            print(f"  {kind}: ", end="")
            policy = train(path, given.names, given.workers, given.epochs, **options)
            won = success(policy, given.trials, stacked=options.get("stacked", False)) if given.data is None else None
            print("" if won is None else f", {won:.0%} of {given.trials} trials won", flush=True)


if __name__ == "__main__":
    main()
