"""Conversions of a batch's bookkeeping to the names and layouts that models and kernels of other libraries expect.

The guide `docs/guides/conventions.md` lists them in one table. Dreamer's `is_first` is the batch's own, transposed.

Guarantees: results are new tensors on the batch's device. No function makes the host wait for a device; `segments` and
`cu_seqlens` are computed from `batch.host`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from stream_dataloader.batch import StreamBatch
from stream_dataloader.recurrent.varlen import (
    Segments,
    begins_segment,
    count_starts,
    cuts_of,
    find_padding_edges,
    find_segments,
    find_starts,
    to_device,
)

__all__ = ["cu_seqlens", "done", "is_init", "position_ids", "prev_exists", "segments", "seq_idx"]

Array = np.ndarray[Any, Any]


def is_init(batch: StreamBatch) -> torch.Tensor:
    """Return torchrl's flag for the first step of a trajectory, as its `InitTracker` writes it.

    It is `is_first`. Padding is not marked. In recurrent mode `LSTMModule` does not zero the state at t = 0: give
    it the carried state there, times `~batch.reset`, and zeros at all other steps.

    Source: torchrl 0.14, `torchrl.envs.InitTracker`, `torchrl.modules.LSTMModule`.

    Returns:
        `(B, T, 1)` bool, for a TensorDict of batch size `(B, T)`.
    """
    return _rows(batch.is_first).unsqueeze(-1)


def prev_exists(batch: StreamBatch) -> torch.Tensor:
    """Return the flag of temporal memories in driving: the frame before is of the same scene, so the memory is kept.

    It is 0 where a stream starts, else 1; also 1 in padding. It is a float because StreamPETR multiplies its memory by
    it, computes `1 - prev_exists`, and creates its memory with the same dtype.

    Source: Wang and others, Exploring Object-Centric Temporal Modeling for Efficient Multi-View 3D Object
    Detection, ICCV 2023; `StreamPETRHead.pre_update_memory`. BEVFormer's `prev_bev_exists` is the same flag.

    Returns:
        `(B, T)` float32; frame t takes `[:, t]`.
    """
    return (~_rows(batch.is_first)).float()


def seq_idx(batch: StreamBatch) -> torch.Tensor:
    """Return Mamba-2's sequence number of each step: the number of starts so far in the lane's window.

    The numbers decide whether the carried state is used, because `initial_states` belongs to sequence 0. A lane that
    continues a stream has 0 up to its first start. A lane that starts at t = 0 has no 0, so its state is reset. Do not
    shift or renumber them. Padding has the number of the step before it.

    Source: Dao and Gu, Transformers are SSMs, ICML 2024; mamba_ssm 2.3, `mamba_chunk_scan_combined(...,
    initial_states=, seq_idx=)`.

    Returns:
        `(B, T)` int32, contiguous.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.recurrent import seq_idx
        >>> dataset = StreamDataset([4, 3, 1], range, batch_size=1, time_steps=5, windows="packed")
        >>> [seq_idx(batch).tolist() for batch in StreamDataLoader(dataset)]
        [[[1, 1, 1, 1, 2]], [[0, 0, 1, 1, 1]]]
    """
    if torch.compiler.is_compiling() or not _is_in_host(batch):
        return _rows(batch.is_first.cumsum(0, dtype=torch.int32))
    return torch.from_numpy(count_starts(*_starts(batch)))


def done(batch: StreamBatch) -> torch.Tensor:
    """Return the flag of reinforcement learning for the last step of a stream.

    It is `is_last`. Padding is not marked. Only the data can say whether an episode ended there (torchrl's
    `terminated`) or was cut off (`truncated`).

    Source: torchrl 0.14, the entries `done` and `("next", "done")`; LeRobot's `next.done`.

    Returns:
        `(B, T, 1)` bool, for a TensorDict of batch size `(B, T)`.

    Raises:
        ValueError: The dataset has neither `mark_ends=True` nor `lengths`.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.recurrent import done
        >>> dataset = StreamDataset([2, 4], range, 1, time_steps=3, windows="packed", mark_ends=True)
        >>> [done(batch).squeeze(-1).int().tolist() for batch in StreamDataLoader(dataset)]
        [[[0, 1, 0]], [[0, 0, 1]]]
    """
    if batch.is_last is None:
        what = "this batch does not say where streams end"
        raise ValueError(f"{what}; use StreamDataset(..., mark_ends=True), or give it lengths=")
    return _rows(batch.is_last).unsqueeze(-1)


def segments(batch: StreamBatch) -> Segments:
    """Return the segments of the lanes, laid end to end by `flatten_lanes`, and which of them continue a state."""
    cuts = _cuts(batch)
    padding = batch._in_host("source_index") < 0
    return find_segments(cuts, batch._in_host("is_first").numpy(), padding.numpy(), batch.is_first.device)


def cu_seqlens(batch: StreamBatch) -> torch.Tensor:
    """Return the boundaries of segments, as kernels for sequences of different lengths expect them.

    The lanes are laid end to end. A segment begins at t = 0 of each lane (even if its stream continues), at the start
    of a stream, and at padding. No segment is longer than T, so `max_seqlen=batch.time_steps` is always right.

    Source: flash-attention 2, `flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, ...)`;
    flash-linear-attention 0.5, `chunk_gated_delta_rule(..., cu_seqlens=)` and others.

    Returns:
        `(N + 1,)` int32, from 0 to `B * T`. N depends on the data. `segments(batch)` has more about each segment.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.recurrent import cu_seqlens
        >>> dataset = StreamDataset([5, 2], range, batch_size=2, time_steps=3)
        >>> [cu_seqlens(batch).tolist() for batch in StreamDataLoader(dataset)]
        [[0, 3, 5, 6], [0, 2, 3, 6]]
    """
    cuts = torch.from_numpy(_cuts(batch))
    return cuts if _is_in_host(batch) else to_device(cuts, batch.is_first.device)


def position_ids(batch: StreamBatch, within: Literal["segment", "stream"] = "segment") -> torch.Tensor:
    """Return the positions of steps, for the lanes laid end to end.

    Args:
        within: `"segment"` counts from 0 in each segment of `cu_seqlens`, as flash-linear-attention's
            `prepare_position_ids` and transformers' `DataCollatorWithFlattening` do. `"stream"` is `position`,
            which counts from the source's beginning, also in sections and documents within it; 0 in padding.
            Pass `cu_seqlens` too, because transformers otherwise guesses the cuts from the positions, and misses
            some of them.

    Returns:
        `(1, B * T)` int64.

    Raises:
        ValueError: `within` is neither of these.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.recurrent import position_ids
        >>> dataset = StreamDataset([5, 2], range, batch_size=2, time_steps=3)
        >>> for batch in StreamDataLoader(dataset):
        ...     print(position_ids(batch).tolist(), position_ids(batch, "stream").tolist())
        [[0, 1, 2, 0, 1, 0]] [[0, 1, 2, 0, 1, 0]]
        [[0, 1, 0, 0, 1, 2]] [[3, 4, 0, 0, 0, 0]]
    """
    if within == "stream":
        return _rows(batch.position.clamp(min=0)).reshape(1, -1)
    if within != "segment":
        raise ValueError(f'within must be "segment" or "stream", not {within!r}')
    step = torch.arange(len(batch.is_first), dtype=torch.int64, device=batch.is_first.device).unsqueeze(1)
    begins = begins_segment(batch.is_first, batch.source_index < 0)
    begun = torch.where(begins, step, 0).cummax(0).values
    return _rows(step - begun).reshape(1, -1)


def _is_in_host(batch: StreamBatch) -> bool:
    return batch._books_for("is_first") is not None or batch.is_first.device.type == "cpu"


def _starts(batch: StreamBatch) -> tuple[Array, int, int]:
    """Return the starts of streams in the row of lanes laid end to end, and T and B."""
    if (books := batch._books_for("is_first")) is not None:
        return books.starts(), *books.shape
    is_first = batch._in_host("is_first").numpy()
    return find_starts(is_first), *is_first.shape


def _cuts(batch: StreamBatch) -> Array:
    """Return `cu_seqlens` in host memory."""
    starts, steps, lanes = _starts(batch)
    if (books := batch._books_for("source_index")) is not None:
        edges = books.padding_edges()
    else:
        edges = find_padding_edges((batch._in_host("source_index") < 0).numpy())
    return cuts_of(starts, edges, steps, lanes)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a `(T, B)` tensor as a contiguous copy `(B, T)`."""
    return tensor.T.clone(memory_format=torch.contiguous_format)
