"""Memory beyond a window: a ball passes behind a wall for longer than a window, and a network says where it comes out.

    python benchmarks/behind_the_wall.py [--quick] [--runs 3] [--jobs 2] [--out docs/assets]

Clips of 64x32 are drawn and written as H.264; in each, three balls fly from left to right, one after another, at one of
eight heights. A wall hides a ball for two windows of T = 16 frames and more. `VideoStream` decodes the clips, 32 lanes
at a time. A GRU is asked in each frame, from when the ball is in the picture until it comes out, at which height that
will be. It is trained and tested with its state carried from window to window, and with the state reset at every
window: same clips, same order, same number of steps. No gradient reaches back over more than a window in either.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from proof import (
    BLUE,
    GREY,
    VERMILION,
    figure_of,
    line_with_span,
    options_of,
    side_by_side,
    span,
    table,
    take_step,
    told,
    write,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState
from stream_dataloader.streams import VideoStream

Array = np.ndarray[Any, Any]
TIME_STEPS, LANES = 16, 32
HEIGHT, WIDTH, RADIUS, HEIGHTS, BALLS = 32, 64, 2, 8, 3
WALL = (13, 51)  #: its columns
UNASKED, IN_SIGHT = -1, -1
SEEN = (HEIGHT // 2, WIDTH // 2)  #: the size that frames are decoded to
_FOLDER = Path(tempfile.gettempdir()) / "stream_dataloader_behind_the_wall"


class Clip(NamedTuple):
    """A clip, and what is asked of it.

    Attributes:
        path: The file.
        answer: `(frames,)`: the height at which the ball comes out, 0 to 7; -1 where nothing is asked.
        hidden: `(frames,)`: for how many frames the ball has been hidden; -1 where it can be seen.
        left: `(frames,)`: for how many frames it still is.
    """

    path: str
    answer: Array
    hidden: Array
    left: Array


def make_clips(first: int, count: int) -> list[Clip]:
    """So many clips from a number on; each is drawn once."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    numbers = range(first, first + count)
    return [_clip(number) for number in tqdm(numbers, desc="clips", unit="clip", leave=False, mininterval=5)]


def _clip(number: int) -> Clip:
    rng = np.random.default_rng(number)
    pictures, answers, hidden, left = [], [], [], []
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    for _ in range(BALLS):
        answer, speed = int(rng.integers(HEIGHTS)), rng.uniform(0.65, 0.95)
        middles = np.arange(-RADIUS - 1, WIDTH + RADIUS + 1, speed)
        middles = np.concatenate([np.full(rng.integers(40), middles[0]), middles])  # the balls of lanes are not in step
        behind = (middles - RADIUS >= WALL[0]) & (middles + RADIUS + 1 <= WALL[1])  # no pixel of it can be seen
        for t, middle in enumerate(middles):
            picture = rng.normal(64, 6, (HEIGHT, WIDTH))
            ball = (rows - (answer + 0.5) * HEIGHT / HEIGHTS) ** 2 + (columns - middle) ** 2 <= (RADIUS + 0.3) ** 2
            picture[ball] = 235
            picture[:, WALL[0] : WALL[1]] = 120
            pictures.append(picture)
            asked = RADIUS <= middle <= WALL[1] - RADIUS - 1
            answers.append(answer if asked else UNASKED)
            hidden.append(int(behind[:t].sum()) if behind[t] else IN_SIGHT)
            left.append(int(behind[t + 1 :].sum()) if behind[t] else IN_SIGHT)
    path = _FOLDER / f"{number}.mp4"
    if not path.exists():
        _write(path, pictures)
    return Clip(str(path), np.array(answers), np.array(hidden), np.array(left))


def _write(path: Path, pictures: list[Array]) -> None:
    unfinished = path.with_suffix(".part.mp4")
    with av.open(str(unfinished), "w") as container:
        video: Any = container.add_stream("libx264", 25, options={"crf": "18", "bf": "0"})  # nothing is from later
        video.height, video.width, video.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(picture.clip(0, 255).astype(np.uint8), "gray")
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
    unfinished.rename(path)


def of_batch(clips: list[Clip], batch: StreamBatch, name: str) -> Tensor:
    """Labels of each time step, `(T, B)`; -1 for padding. Labels are found by source and position."""
    longest = max(len(clip.answer) for clip in clips)
    told_of = [np.pad(getattr(clip, name), (0, longest - len(clip.answer) + 1), constant_values=-1) for clip in clips]
    # The last column is -1, and is found by padding's position, -1.
    found = torch.from_numpy(np.stack(told_of))[batch.source_index.clamp(min=0), batch.position]
    return found.masked_fill(batch.source_index < 0, -1)


class Watcher(nn.Module):
    """Scores `(T, B, 8)` of heights from pictures `(T, B, 1, 16, 32)`, and the state after them.

    Args:
        background: What does not move, `(1, 16, 32)`, is taken off.
        features: Size of the state.
    """

    def __init__(self, background: Tensor, features: int = 64) -> None:
        super().__init__()
        self.background: Tensor
        self.register_buffer("background", background)
        self.eye = nn.Sequential(
            nn.Flatten(2), nn.Linear(SEEN[0] * SEEN[1], features), nn.LayerNorm(features), nn.ReLU()
        )
        self.gru = nn.GRU(features, features)
        self.head = nn.Linear(features, HEIGHTS)

    def forward(self, pictures: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        output, state = self.gru(self.eye((pictures.float() - self.background) / 32), state)
        return self.head(output), state


class Task(NamedTuple):
    """One training and its test, in a process of its own."""

    carried: bool
    seed: int
    steps: int
    learned: list[Clip]
    unseen: list[Clip]


def loader_of(clips: list[Clip], lanes: int, **order: Any) -> StreamDataLoader[StreamBatch]:
    """Windows of decoded frames."""
    paths = [clip.path for clip in clips]
    return StreamDataLoader(
        StreamDataset(paths, VideoStream(color="gray", size=SEEN), lanes, time_steps=TIME_STEPS, **order)
    )


def run(task: Task) -> tuple[list[float], float]:
    """The share of right answers by frames hidden, and that in the last frame before the ball comes out."""
    torch.manual_seed(task.seed)
    first = next(iter(loader_of(task.learned, LANES))).data
    model = Watcher(first.flatten(0, 1).float().median(0).values)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    carry = RecurrentState(batch_dim=1)
    loader = loader_of(task.learned, LANES, padding_mode="cycle", shuffle=True, seed=task.seed)
    for batch in islice(loader, task.steps):
        scores, state = model(batch.data, carry.before(batch) if task.carried else None)
        carry.after(batch, state)
        answer = of_batch(task.learned, batch, "answer")
        asked = answer != UNASKED
        if not asked.any():
            continue
        loss = cross_entropy(scores[asked], answer[asked])
        take_step(model, optimizer, loss)
    return tested(model, task)


@torch.no_grad()
def tested(model: Watcher, task: Task) -> tuple[list[float], float]:
    """Return the results of `run` on clips that the model has not seen."""
    carry, right, hidden, left = RecurrentState(batch_dim=1), [], [], []
    for batch in loader_of(task.unseen, LANES):
        scores, state = model(batch.data, carry.before(batch) if task.carried else None)
        carry.after(batch, state)
        right.append(scores.argmax(-1) == of_batch(task.unseen, batch, "answer"))
        hidden.append(of_batch(task.unseen, batch, "hidden"))
        left.append(of_batch(task.unseen, batch, "left"))
    hits, since, until = (torch.cat(parts) for parts in (right, hidden, left))
    shortest = int(since[until == 0].min())  # so that each point is the mean over all balls
    return [hits[since == n].double().mean().item() for n in range(shortest + 1)], hits[
        until == 0
    ].double().mean().item()


def numbers_of(tasks: list[Task], outcomes: list[tuple[list[float], float]]) -> dict[str, Any]:
    """Return the numbers to draw and print."""
    found: dict[str, Any] = {}
    for name, carried in (("carried", True), ("reset", False)):
        runs = [outcome for task, outcome in zip(tasks, outcomes, strict=True) if task.carried == carried]
        by_frame = [span(values) for values in zip(*(run[0] for run in runs), strict=True)]
        found[name] = {"by frames hidden": by_frame, "last frame": span(run[1] for run in runs), "runs": len(runs)}
    lengths = np.concatenate([clip.hidden[clip.left == 0] + 1 for clip in tasks[0].learned + tasks[0].unseen])
    return {
        "steps": tasks[0].steps,
        "clips": [len(tasks[0].learned), len(tasks[0].unseen)],
        "frames hidden": [int(lengths.min()), int(lengths.max())],
        **found,
    }


def tables(numbers: dict[str, Any]) -> list[str]:
    """The tables of the page, in Markdown."""
    late = numbers["carried"]["by frames hidden"]
    head = ["state", f"hidden for {len(late) // 2} frames", "last frame before it comes out"]
    rows = [
        [name, told(numbers[name]["by frames hidden"][len(late) // 2 - 1], 2), told(numbers[name]["last frame"], 2)]
        for name in ("carried", "reset")
    ]
    return [table(head, [*rows, ["guessing", f"{1 / HEIGHTS:.3f}", f"{1 / HEIGHTS:.3f}"]])]


def draw(numbers: dict[str, Any], clip: Clip, path: Path) -> None:
    """Some decoded frames, and below them the share of right answers against the frames since the ball went in."""
    from matplotlib.figure import Figure  # needed only here

    frames = list(VideoStream(color="gray")(clip.path))
    gone = int(np.flatnonzero(clip.hidden == 0)[0])
    out = int(np.flatnonzero(clip.left == 0)[0])
    shown = {gone - 11: "goes in", gone: "hidden", gone + TIME_STEPS: f"hidden for {TIME_STEPS}", out: "last hidden"}
    shown[out + 6] = "comes out"
    image = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    grid = image.add_gridspec(2, len(shown), height_ratios=[1, 3])
    for column, (number, name) in enumerate(shown.items()):
        small = image.add_subplot(grid[0, column])
        small.imshow(np.asarray(frames[number])[0], cmap="gray", vmin=0, vmax=255)
        small.set_title(name, fontsize=9)
        small.set_xticks([])
        small.set_yticks([])
    axes = image.add_subplot(grid[1, :])
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    for name, style in (
        ("carried", {"color": BLUE, "marker": "^", "label": "state carried from window to window"}),
        ("reset", {"color": VERMILION, "marker": "o", "linestyle": "--", "label": "state reset at every window"}),
    ):
        cells = numbers[name]["by frames hidden"]
        line_with_span(axes, range(1, len(cells) + 1), cells, markersize=4, **style)
    axes.axhline(1 / HEIGHTS, color=GREY, linestyle=":", label="guessing: 1 in 8")
    axes.axvline(TIME_STEPS, color="0.3", linewidth=1)
    axes.text(TIME_STEPS + 0.4, 0.55, f"T = {TIME_STEPS}")
    axes.set_xlabel("frames since the ball went behind the wall")
    axes.set_ylabel("right answers (share)")
    axes.set_ylim(0, 1.04)
    axes.legend(frameon=False, fontsize=9, loc="center right")
    image.savefig(path)


def main() -> None:
    """Draw clips, train, test, draw."""
    options = options_of("A ball behind a wall: state carried against state reset.")
    steps, learned, unseen = (3, 32, 2) if options.quick else (120, 256, 64)
    learn, test = make_clips(0, learned), make_clips(10_000, unseen)
    tasks = [Task(carried, seed, steps, learn, test) for seed in range(options.runs) for carried in (True, False)]
    numbers = numbers_of(tasks, side_by_side(run, tasks, options.jobs, options.keep))
    draw(numbers, test[0], options.out / "behind_the_wall.png")
    print("\n\n".join(tables(numbers)))
    section = "share of right answers in the last frame before the ball comes out"
    rows = [figure_of(section, f"state {name}", numbers[name]["last frame"], "of 1") for name in ("carried", "reset")]
    write(options, "behind_the_wall", numbers, rows)


if __name__ == "__main__":
    main()
