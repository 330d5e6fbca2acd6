"""A stateful finish: a model trained on short windows, whose state is carried in the last tenth of its steps only.

    python benchmarks/stateful_finish.py [--quick] [--runs 3] [--jobs 2] [--out docs/assets]

Two byte-level language models learn Python's own standard library in eight lanes, in windows of T = 64 bytes. Files are
cut into sections of at most 2,048 bytes, at places drawn anew each epoch. All see the same batches, and take as many
steps: with the state reset at every window, with the state carried from window to window, or reset for nine tenths of
the steps and carried for the last. Then they read 24 files that they have not seen, 16,384 bytes of each in one go, and
the loss is drawn against the place in the file. Buitrago Ruiz and Gu (Understanding and Improving Length Generalization
in Recurrent Models, 2025, arXiv 2507.02782) do this with state-space models.

The second figure has the GRU with other orders: windows of all files mixed, whole files shuffled, files as listed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from byte_language import MODELS, TIME_STEPS, Training, library, loss_by_position, training_loader
from interleaved import Result
from proof import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    VERMILION,
    figure_of,
    line_with_span,
    options_of,
    panels,
    side_by_side,
    span,
    table,
    told,
    write,
)

RESET, FINISH, CARRIED, BOTH_RESET = "reset", "finish", "carried", "reset, in the test too"
MIXED, LISTED, FILES = "mixed windows", "files as listed", "files shuffled"
SECTION_STEPS = 32 * TIME_STEPS
PARTS = "first window", "later"
#: How the second figure names its rows.
ORDERS = {
    MIXED: "windows of all files mixed, reset",
    RESET: f"sections of {SECTION_STEPS:,} shuffled, reset",
    CARRIED: f"sections of {SECTION_STEPS:,} shuffled, carried",
    FILES: "whole files shuffled, carried",
    LISTED: "whole files as listed, carried",
}


class Task(NamedTuple):
    """One training, in a process of its own."""

    model: str
    seed: int
    how: str
    steps: int
    held_out: int
    reach: int


Losses = dict[str, list[float]]


def run(task: Task) -> Losses:
    """The loss at each place, by what was trained and how it was tested."""
    files, unseen = library(task.held_out, task.reach)

    def tested(training: Training, *, carried: bool = True) -> list[float]:
        losses: list[float] = loss_by_position(training.model, unseen, task.reach, carried=carried).tolist()
        return losses

    def begun(*, section_steps: int | None = SECTION_STEPS, shuffle: bool = True) -> Training:
        loader = training_loader(files, task.seed, section_steps=section_steps, shuffle=shuffle)
        return Training(task.model, loader, task.seed, task.steps)

    if task.how == RESET:
        training, last = begun(), task.steps // 10
        training.run(task.steps - last, carried=False)
        saved = copy.deepcopy(training.state_dict())
        training.run(last, carried=False)
        finish = begun()
        finish.load_state_dict(saved)  # the loader goes on at the same batch
        finish.run(last, carried=True)
        return {RESET: tested(training), BOTH_RESET: tested(training, carried=False), FINISH: tested(finish)}
    orders: dict[str, dict[str, Any]] = {
        CARRIED: {},
        MIXED: {"section_steps": TIME_STEPS},  # each window is a stream, so none goes on
        FILES: {"section_steps": None},
        LISTED: {"section_steps": None, "shuffle": False},
    }
    training = begun(**orders[task.how])
    training.run(task.steps, carried=task.how != MIXED)
    return {task.how: tested(training)}


def mean(losses: Sequence[float], start: int, stop: int) -> float:
    """The mean loss at the places `[start, stop)`."""
    return sum(losses[start:stop]) / (stop - start)


def edges(reach: int) -> list[int]:
    """Places that bound what is one point of the figure: 0, 16, 32, 64, ..."""
    return [0, *(2**n for n in range(4, reach.bit_length()))]


def summary(model: str, runs: dict[str, list[Losses]], reach: int) -> dict[str, Any]:
    """Of one model, by how it was trained: the loss in octaves of places, before T, after it, and in the last half.

    And the same less the loss of the model of the same run whose state was always reset.
    """
    parts = {"first window": (0, TIME_STEPS), "later": (TIME_STEPS, reach), "last half": (reach // 2, reach)}
    found: dict[str, Any] = {}
    for how in dict.fromkeys(name for losses in runs[model] for name in losses):
        each = [losses[how] for losses in runs[model] if how in losses]
        found[how] = {name: span(mean(one, *part) for one in each) for name, part in parts.items()}
        found[how]["by place"] = [span(mean(one, *pair) for one in each) for pair in itertools.pairwise(edges(reach))]
        beside = list(zip(each, (losses[RESET] for losses in runs[model] if RESET in losses), strict=True))
        against = {name: span(mean(a, *part) - mean(b, *part) for a, b in beside) for name, part in parts.items()}
        found[how]["against reset"] = against
        found[how]["against reset by place"] = [
            span(mean(a, *pair) - mean(b, *pair) for a, b in beside) for pair in itertools.pairwise(edges(reach))
        ]
        found[how]["runs"] = len(each)
    return found


def rows(numbers: dict[str, Any], model: str) -> list[list[str]]:
    """Of the table of one model."""
    names = {RESET: "reset", FINISH: "reset, then carried in the last tenth", CARRIED: "carried"}
    names |= {BOTH_RESET: "reset, and reset in the test too"}
    return [[model, names[how], *cells(numbers["models"][model][how])] for how in (RESET, BOTH_RESET, FINISH, CARRIED)]


def cells(found: dict[str, Any]) -> list[str]:
    """The loss in the first window, after it, and how far the latter is from that of the same run without state."""
    return [told(found[part], 3) for part in PARTS] + [signed(found["against reset"]["later"])]


def signed(cell: dict[str, float]) -> str:
    """`-0.012 (-0.020 to -0.004)`, or nothing where there is no difference to tell."""
    if not any(cell.values()):
        return ""
    mean, low, high = (f"{cell[name]:+.3f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def tables(numbers: dict[str, Any]) -> list[str]:
    """The tables of the page, in Markdown."""
    places = [f"first {TIME_STEPS} bytes", f"bytes {TIME_STEPS} to {numbers['reach']:,}", "of these, less reset"]
    gru = numbers["models"]["GRU"]
    both = [row for model in numbers["models"] for row in rows(numbers, model)]
    return [
        table(["model", "state in training", *places], both),
        table(["GRU, order and state in training", *places], [[ORDERS[how], *cells(gru[how])] for how in ORDERS]),
    ]


def results(numbers: dict[str, Any]) -> Iterator[Result]:
    """Return how much lower the loss is than that of the same run whose state was always reset."""
    for model, found in numbers["models"].items():
        for how in (FINISH, CARRIED):
            mean, low, high = (-found[how]["against reset"]["later"][name] for name in ("mean", "high", "low"))
            better = {"mean": mean, "low": low, "high": high}
            yield figure_of(f"{model}: loss after the first window, reset less this", how, better, "nats")


def draw(numbers: dict[str, Any], path: Path) -> None:
    """Loss against place, and below it how far it is from that of models that were always reset; a column a model."""
    reach = numbers["reach"]
    middles = [(max(a, 4) * b) ** 0.5 for a, b in itertools.pairwise(edges(reach))]
    image, axes = panels(len(MODELS), 2, height=7.0, sharex=True, sharey="row")
    lines: dict[str, dict[str, Any]] = {
        RESET: {"color": VERMILION, "linestyle": "-", "marker": "o", "label": "reset at every window"},
        BOTH_RESET: {"color": GREY, "linestyle": ":", "marker": "x", "label": "the same, reset in the test too"},
        FINISH: {"color": GREEN, "linestyle": "--", "marker": "s", "label": "carried in the last tenth of steps"},
        CARRIED: {"color": BLUE, "linestyle": "-", "marker": "^", "label": "carried in all steps"},
    }
    for column, (model, found) in enumerate(numbers["models"].items()):
        for row, values in enumerate(("by place", "against reset by place")):
            one = axes[row * len(MODELS) + column]
            for how, style in lines.items():
                line_with_span(one, middles, found[how][values], markersize=4, **style)
            one.axvline(TIME_STEPS, color="0.3", linewidth=1)
            one.text(TIME_STEPS * 1.15, 0.97, f"T = {TIME_STEPS}", transform=one.get_xaxis_transform(), va="top")
            one.set_xscale("log", base=2)
            one.set_xticks([2**n for n in range(4, 15, 2)], [f"{2**n:,}" for n in range(4, 15, 2)], fontsize=9)
        axes[column].set_title(model)
        axes[-1 - column].set_xlabel("place in the file (bytes)")
    axes[0].set_ylabel("loss (nats a byte)")
    axes[len(MODELS)].set_ylabel("less that of the same run,\nalways reset (nats a byte)")
    axes[len(MODELS)].set_ylim(-0.12, 0.17)
    image.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2,
        frameon=False,
        title="state in training",
    )
    image.savefig(path)


def draw_orders(numbers: dict[str, Any], path: Path) -> None:
    """The GRU's loss in the first window and after it, by the order that it was trained with."""
    image, (axes,) = panels(1, height=3.2)
    for part, color, mark, shift, label in (
        ("first window", PURPLE, "o", 0.12, f"first {TIME_STEPS} bytes: nothing to carry"),
        ("later", BLUE, "s", -0.12, f"bytes {TIME_STEPS} to {numbers['reach']:,}, state carried"),
    ):
        for place, how in enumerate(reversed(ORDERS)):
            cell = numbers["models"]["GRU"][how][part]
            axes.plot([cell["low"], cell["high"]], [place + shift] * 2, color=color, linewidth=2)
            axes.plot(cell["mean"], place + shift, mark, color=color, label=label if place == 0 else None)
    axes.set_yticks(range(len(ORDERS)), [ORDERS[how] for how in reversed(ORDERS)])
    axes.set_xlabel("loss (nats a byte), lower is better")
    image.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    image.savefig(path)


def main() -> None:
    """Train, test, draw."""
    options = options_of("Training with the state carried, in all steps or the last tenth, against none.")
    steps, held_out, reach = (20, 2, 256) if options.quick else (1200, 24, 16384)
    tasks = [
        Task(model, seed, how, steps, held_out, reach)
        for seed in range(options.runs)
        for model in MODELS
        for how in (RESET, CARRIED, *((MIXED, FILES, LISTED) if model == "GRU" else ()))
    ]
    runs: dict[str, list[Losses]] = {model: [] for model in MODELS}
    for task, losses in zip(tasks, side_by_side(run, tasks, options.jobs, options.keep), strict=True):
        runs[task.model].append(losses)
    found = {model: summary(model, runs, reach) for model in MODELS}
    numbers = {"steps": steps, "held_out": held_out, "reach": reach, "models": found}
    draw(numbers, options.out / "stateful_finish.png")
    draw_orders(numbers, options.out / "stateful_finish_orders.png")
    print("\n\n".join(tables(numbers)))
    write(options, "stateful_finish", numbers, list(results(numbers)))


if __name__ == "__main__":
    main()
