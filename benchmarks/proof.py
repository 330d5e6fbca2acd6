"""Common parts of the proofs: runs side by side, figures that all can read, and numbers beside them.

A proof trains or measures something several times with fixed seeds. It draws the mean of the runs, and the span from
the lowest to the highest, and writes the same as JSON. `docs/proof.md` shows both; a test compares them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import pickle
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import av
import torch
from interleaved import Result, Row, write_json
from torch import nn
from tqdm import tqdm

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

#: Okabe and Ito, Color Universal Design, 2008: told apart with any colour vision. Lines differ by dashes or marks too.
BLUE, VERMILION, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#555555"
ASSETS = Path(__file__).parents[1] / "docs" / "assets"


def options_of(description: str, quick_runs: int = 1, full_runs: int = 3) -> argparse.Namespace:
    """The command's options: `quick`, `runs`, `jobs` and `out`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="tiny runs, into a folder of its own")
    parser.add_argument("--runs", type=int, help=f"how many, each with a seed of its own ({full_runs})")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each (2)")
    parser.add_argument("--keep", type=Path, help="keeps what is done here, for when the command is run again")
    parser.add_argument("--out", type=Path, help="where the figure and the numbers go (docs/assets, or beside --json)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write some of the numbers here")
    options = parser.parse_args()
    options.runs = options.runs or (quick_runs if options.quick else full_runs)
    if options.json:
        options.out = options.out or options.json.parent
    options.out = options.out or (Path(tempfile.mkdtemp(prefix="proof-")) if options.quick else ASSETS)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def side_by_side(
    run: Callable[[Task], Outcome], tasks: Sequence[Task], jobs: int, keep: Path | None = None
) -> list[Outcome]:
    """The outcome of each task, in order; each is run in a process that uses one thread.

    Args:
        run: Runs a task.
        tasks: Tuples, which pickle.
        jobs: How many processes.
        keep: A folder where outcomes are kept, for a command that is stopped and run again. None: nowhere.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        done = pool.map(partial(_kept, run, keep), tasks)
        return list(tqdm(done, total=len(tasks), unit="task", mininterval=5))


def _kept(run: Callable[[Task], Outcome], keep: Path | None, task: Task) -> Outcome:
    if keep is None:
        return run(task)
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{hashlib.sha256(pickle.dumps(task)).hexdigest()[:16]}.pickle"
    if path.exists():
        kept: Outcome = pickle.loads(path.read_bytes())
        return kept
    outcome = run(task)
    path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".part").rename(path)
    return outcome


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Train a model on one batch; the norm of all gradients is at most 1."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def span(values: Iterable[float]) -> dict[str, float]:
    """Mean, lowest and highest of the runs."""
    found = list(values)
    return {name: round(of(found), 4) for name, of in (("mean", statistics.fmean), ("low", min), ("high", max))}


def told(cell: dict[str, float], digits: int) -> str:
    """`1.23 (1.20 to 1.26)`."""
    mean, low, high = (f"{cell[name]:,.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure_of(section: str, name: str, cell: dict[str, float], unit: str) -> Result:
    """A figure for the table of all programs, of which more is better; it is the mean of the runs."""
    return Result(section, name, cell["mean"], unit, (cell["low"], cell["high"]), at_most=False, note="mean")


def write(options: argparse.Namespace, name: str, numbers: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the numbers as JSON, with what they were made with; and rows where `--json` says."""
    made_with = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "av": av.__version__,
    }
    path = options.out / f"{name}.json"
    path.write_text(json.dumps({"made_with": made_with, **numbers}, indent=1) + "\n")
    print(f"\nwritten: {path} and the figures beside it")
    if options.json:
        write_json(options.json, rows, quick=options.quick)


def panels(
    columns: int, rows: int = 1, width: float = 9.0, height: float = 4.0, **sharing: Any
) -> tuple[Any, list[Any]]:
    """A figure with so many axes side by side, and rows of them."""
    from matplotlib.figure import Figure  # needed only here

    image = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = image.subplots(rows, columns, squeeze=False, **sharing).ravel()
    for one in axes:
        one.grid(color="0.9")
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return image, list(axes)


def line_with_span(axes: Any, x: Sequence[float], cells: Sequence[dict[str, float]], **style: Any) -> None:
    """The mean as a line, and lowest to highest as a band."""
    (line,) = axes.plot(x, [cell["mean"] for cell in cells], **style)
    low, high = ([cell[name] for cell in cells] for name in ("low", "high"))
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
