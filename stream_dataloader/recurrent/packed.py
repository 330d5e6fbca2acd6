"""Models for packed windows, in which a stream may start at any time step.

Guarantee: each stream's outputs are those of the stream run alone, even if the stream before it gave NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stream_dataloader.recurrent.states import along, map_tensors, take_apart

__all__ = ["linear_scan", "masked_rnn"]


def masked_rnn(
    cell: Callable[[Any, Any], Any],
    inputs: torch.Tensor,
    *,
    state: Any,
    is_first: torch.Tensor,
    initial: Any = None,
    real: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    """Call a cell step by step, and reset a lane's state where a stream starts inside the window.

    Args:
        cell: `cell(inputs[t], state)` returns the next state: `torch.nn.LSTMCell`, `GRUCell`, or any other cell, such
            as a convolutional one. The first tensor of the state is the output. The lanes are dimension 0 of each
            tensor.
        inputs: `(T, B, ...)`.
        state: The state before t = 0, as `RecurrentState.before` returns it. None is passed on to the cell.
        is_first: `(T, B)` bool. Ignored for t = 0, because `before` has already reset those lanes.
        initial: State of one lane at the start of a stream, each tensor `(1, ...)`. None: zeros.
        real: `(T, B)` bool, `~batch.is_padding`. A lane keeps its state at other steps. None: all are real.

    Returns:
        Outputs `(T, B, ...)`, and the state after the last step.

    Raises:
        ValueError: `is_first` or `real` is not `(T, B)` bool, or T is 0.

    Example:
        >>> import torch
        >>> from stream_dataloader.recurrent import masked_rnn
        >>> is_first = torch.tensor([[True], [False], [True]])
        >>> ones, zero = torch.ones(3, 1, 1), torch.zeros(1, 1)
        >>> counted, _ = masked_rnn(lambda x, n: n + x, ones, state=zero, is_first=is_first)
        >>> counted.flatten().tolist()
        [1.0, 2.0, 1.0]
    """
    _check_flags(inputs, is_first, real)

    def begun(mask: torch.Tensor, state: Any) -> Any:
        if initial is None:
            return map_tensors(lambda leaf: leaf.masked_fill(along(0, mask, leaf), 0), state)
        return map_tensors(lambda leaf, one: torch.where(along(0, mask, leaf), one.to(leaf), leaf), state, initial)

    outputs = []
    for t in range(len(inputs)):
        old = state if t == 0 else begun(is_first[t], state)
        state = cell(inputs[t], old)
        if real is not None:
            there = real[t]
            if old is None:
                old = map_tensors(torch.zeros_like, state)
            state = map_tensors(lambda new, kept, m=there: torch.where(along(0, m, new), new, kept.to(new)), state, old)
        outputs.append(take_apart(state)[1][0])
    return torch.stack(outputs), state


def linear_scan(
    *,
    inputs: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor | None,
    is_first: torch.Tensor,
    initial: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the linear recurrence `h[t] = decay[t] * h[t - 1] + inputs[t]`, in parallel over time, with resets.

    All arguments are keyword-only, because inputs and decay often have the same shape, and libraries differ in their
    order. The scan takes about log2(T) steps, each over the whole window (Hillis and Steele, Data Parallel Algorithms,
    1986; Martin and Cundy, Parallelizing Linear Recurrent Neural Nets Over Sequence Length, 2018).

    Args:
        inputs: `(T, B, ...)`, real or complex.
        decay: `(T, B, ...)`; it is expanded to the shape of `inputs`.
        state: `h` before t = 0, `(B, ...)`, as `RecurrentState.before` returns it. None: zeros.
        is_first: `(T, B)` bool. Ignored for t = 0, because `before` has already reset those lanes.
        initial: `h` before a stream's first step, `(1, ...)`. None: zeros.
        real: `(T, B)` bool, `~batch.is_padding`. A lane keeps its state at other steps. None: all are real.

    Returns:
        `h` of all steps, `(T, B, ...)`, and of the last one, `(B, ...)`.

    Raises:
        ValueError: `is_first` or `real` is not `(T, B)` bool, or T is 0.

    Example:
        >>> import torch
        >>> from stream_dataloader.recurrent import linear_scan
        >>> half, is_first = torch.full((4, 1), 0.5), torch.tensor([[True], [False], [True], [False]])
        >>> scanned, _ = linear_scan(inputs=torch.ones(4, 1), decay=half, state=None, is_first=is_first)
        >>> scanned.flatten().tolist()
        [1.0, 1.5, 1.0, 1.5]
    """
    _check_flags(inputs, is_first, real)
    factor, total = decay.expand_as(inputs), inputs
    steps = [len(total), *total.shape[1:2], *[1] * (total.ndim - 2)]
    if real is not None:
        padding = ~real.reshape(steps)
        factor, total = factor.masked_fill(padding, 1), total.masked_fill(padding, 0)
    # Steps before a start do not count. `cut[t]`: a start is among the steps summed in `total[t]` so far.
    cut = is_first.reshape(steps)
    cut = torch.cat([torch.zeros_like(cut[:1]), cut[1:]])
    if initial is not None:
        total = total + factor * cut * initial
    if state is not None:
        total = torch.cat([total[:1] + factor[:1] * state, total[1:]])
    reach = 1
    while reach < len(total):
        before, factor_before = total[:-reach], factor[:-reach]
        late, late_factor, late_cut = total[reach:], factor[reach:], cut[reach:]
        late = late + late_factor * before.masked_fill(late_cut, 0)
        total, factor = (
            torch.cat([total[:reach], late]),
            torch.cat([factor[:reach], late_factor * factor_before.masked_fill(late_cut, 0)]),
        )
        cut = torch.cat([cut[:reach], late_cut | cut[:-reach]])
        reach *= 2
    return total, total[-1]


def _check_flags(inputs: torch.Tensor, is_first: torch.Tensor, real: torch.Tensor | None) -> None:
    if not len(inputs):
        raise ValueError(f"inputs is {tuple(inputs.shape)}, which has no time step")
    for name, flags in (("is_first", is_first), ("real", real)):
        if flags is not None and (flags.shape != inputs.shape[:2] or flags.dtype != torch.bool):
            wanted = f"torch.bool {tuple(inputs.shape[:2])}, as inputs is {tuple(inputs.shape)}"
            raise ValueError(f"{name} is {flags.dtype} {tuple(flags.shape)}; pass {wanted}")
