"""A batch's bookkeeping under the names, and in the layouts, that others' models and kernels take.

Guarantee: none makes the host wait for a device; `segments` and `cu_seqlens` are made of `batch.host`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from stream_dataloader.segments import Segments, begins_segment, find_segments

__all__ = ["Conventions"]


class Conventions:
    """Methods of `StreamBatch` that are named after what others call it.

    All results are new tensors on the batch's device. A guide has them in one table: `docs/guides/conventions.md`.
    """

    if TYPE_CHECKING:  # what a batch has
        is_start: torch.Tensor
        is_last: torch.Tensor | None
        source: torch.Tensor
        position: torch.Tensor

        @property
        def host(self) -> Conventions: ...

    def is_first(self) -> torch.Tensor:
        """Dreamer's flag: the recurrent state, and the action before, are zeroed ahead of this step.

        It is `is_start`. Padding is not marked. Dreamer's `is_last` is the field `is_last`, transposed. Its
        `is_terminal` is the data's to say: a stream may end without its episode being over.

        Source: Hafner and others, Mastering Diverse Control Tasks through World Models, Nature 2025; `dreamerv3`,
        `RSSM._observe`.

        Returns:
            `(B, T)` bool.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> dataset = StreamDataset([2, 4], range, batch_size=1, time_steps=3, windows="packed")
            >>> [batch.is_first().int().tolist() for batch in StreamDataLoader(dataset)]
            [[[1, 0, 1]], [[0, 0, 0]]]
        """
        return _rows(self.is_start)

    def is_init(self) -> torch.Tensor:
        """The flag of torchrl: the first step of a trajectory, as its `InitTracker` writes it.

        It is `is_start`. Padding is not marked. In recurrent mode `LSTMModule` does not zero the state at t = 0: give
        it the carried state there, times `~batch.reset`, and zeros at all other steps.

        Source: torchrl 0.14, `torchrl.envs.InitTracker`, `torchrl.modules.LSTMModule`.

        Returns:
            `(B, T, 1)` bool, for a TensorDict of batch size `(B, T)`.
        """
        return self.is_first().unsqueeze(-1)

    def prev_exists(self) -> torch.Tensor:
        """The flag of temporal memories in driving: the frame before is of the same scene, so the memory is kept.

        It is 0 where a stream starts, else 1; also 1 in padding. It is a factor: StreamPETR multiplies its memory by
        it, computes `1 - prev_exists`, and makes its memory with the dtype of it. A bool would not do.

        Source: Wang and others, Exploring Object-Centric Temporal Modeling for Efficient Multi-View 3D Object
        Detection, ICCV 2023; `StreamPETRHead.pre_update_memory`. BEVFormer's `prev_bev_exists` is the same flag.

        Returns:
            `(B, T)` float32; frame t takes `[:, t]`.
        """
        return (~_rows(self.is_start)).float()

    def seq_idx(self) -> torch.Tensor:
        """Mamba-2's number of the sequence that each step is of: the count of starts so far in its lane's window.

        The numbers say what becomes of the carried state: `initial_states` belongs to sequence 0. A lane that goes on
        has 0 up to its first start, and a lane that starts at t = 0 has no 0, so that its state begins anew. Do not
        shift or renumber them. Padding has the number of the step before it.

        Source: Dao and Gu, Transformers are SSMs, ICML 2024; mamba_ssm 2.3, `mamba_chunk_scan_combined(...,
        initial_states=, seq_idx=)`.

        Returns:
            `(B, T)` int32, contiguous.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> dataset = StreamDataset([4, 3, 1], range, batch_size=1, time_steps=5, windows="packed")
            >>> [batch.seq_idx().tolist() for batch in StreamDataLoader(dataset)]
            [[[1, 1, 1, 1, 2]], [[0, 0, 1, 1, 1]]]
        """
        return _rows(self.is_start.cumsum(0, dtype=torch.int32))

    def done(self) -> torch.Tensor:
        """The flag of reinforcement learning: the step is the last of its stream.

        It is `is_last`. Padding is not marked. Whether an episode was over there (torchrl's `terminated`) or cut off
        (`truncated`) is the data's to say.

        Source: torchrl 0.14, the entries `done` and `("next", "done")`; LeRobot's `next.done`.

        Returns:
            `(B, T, 1)` bool, for a TensorDict of batch size `(B, T)`.

        Raises:
            ValueError: The dataset has neither `mark_ends=True` nor `lengths`.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> dataset = StreamDataset([2, 4], range, 1, time_steps=3, windows="packed", mark_ends=True)
            >>> [batch.done().squeeze(-1).int().tolist() for batch in StreamDataLoader(dataset)]
            [[[0, 1, 0]], [[0, 0, 1]]]
        """
        if self.is_last is None:
            what = "this batch does not say where streams end"
            raise ValueError(f"{what}; use StreamDataset(..., mark_ends=True), or give it lengths=")
        return _rows(self.is_last).unsqueeze(-1)

    def segments(self) -> Segments:
        """Where the lanes, laid end to end by `flatten_lanes`, are cut, and which segments continue a carried state."""
        host = self.host
        return find_segments(host.is_start, host.source < 0, self.is_start.device)

    def cu_seqlens(self) -> torch.Tensor:
        """The places where kernels for sequences of different lengths cut the lanes, laid end to end.

        Each lane's t = 0 begins a segment, also if its stream goes on; so do a stream's start, and padding. No segment
        is longer than T: `max_seqlen=batch.time_steps` needs no look at the data.

        Source: flash-attention 2, `flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, ...)`;
        flash-linear-attention 0.5, `chunk_gated_delta_rule(..., cu_seqlens=)` and others.

        Returns:
            `(N + 1,)` int32, from 0 to `B * T`. N follows from the data; the same `segments` have the rest.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> dataset = StreamDataset([5, 2], range, batch_size=2, time_steps=3)
            >>> [batch.cu_seqlens().tolist() for batch in StreamDataLoader(dataset)]
            [[0, 3, 5, 6], [0, 2, 3, 6]]
        """
        return self.segments().cu_seqlens

    def position_ids(self, within: Literal["segment", "stream"] = "segment") -> torch.Tensor:
        """The steps' positions, for the lanes laid end to end.

        Args:
            within: `"segment"` counts from 0 in each segment of `cu_seqlens`, as flash-linear-attention's
                `prepare_position_ids` and transformers' `DataCollatorWithFlattening` do. `"stream"` is `position`,
                which counts from the source's beginning, also in sections and documents within it; 0 in padding.
                Give `cu_seqlens` along with it:
                transformers finds the cuts by what positions look like, and misses some of them.

        Returns:
            `(1, B * T)` int64.

        Raises:
            ValueError: `within` is neither.

        Example:
            >>> from stream_dataloader import StreamDataLoader, StreamDataset
            >>> dataset = StreamDataset([5, 2], range, batch_size=2, time_steps=3)
            >>> for batch in StreamDataLoader(dataset):
            ...     print(batch.position_ids().tolist(), batch.position_ids("stream").tolist())
            [[0, 1, 2, 0, 1, 0]] [[0, 1, 2, 0, 1, 0]]
            [[0, 1, 0, 0, 1, 2]] [[3, 4, 0, 0, 0, 0]]
        """
        if within == "stream":
            return _rows(self.position.clamp(min=0)).reshape(1, -1)
        if within != "segment":
            raise ValueError(f'within must be "segment" or "stream", and is {within!r}')
        step = torch.arange(len(self.is_start), dtype=torch.int64, device=self.is_start.device).unsqueeze(1)
        begins = begins_segment(self.is_start, self.source < 0)
        begun = torch.where(begins, step, 0).cummax(0).values
        return _rows(step - begun).reshape(1, -1)

    def flatten_lanes(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the batch with its lanes laid end to end in one row, as `cu_seqlens` counts them.

        Args:
            tensor: `(T, B, ...)`: the data or a leaf of it, `mask`, or what a model made of them.

        Returns:
            `(1, B * T, ...)`: lane 0's T steps, then lane 1's, and so on. flash-attention takes it without the leading
            1: `[0]`.

        Raises:
            TypeError: `tensor` is none.
            ValueError: It is not `(T, B, ...)`.
        """
        steps, lanes = _checked(tensor, tuple(self.is_start.shape), "(T, B, ...)", "flatten_lanes")
        return tensor.transpose(0, 1).reshape(1, lanes * steps, *tensor.shape[2:])

    def unflatten_lanes(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `flatten_lanes`.

        Args:
            tensor: `(1, B * T, ...)`.

        Returns:
            `(T, B, ...)`, a view where torch can make one.

        Raises:
            TypeError: `tensor` is none.
            ValueError: It is not `(1, B * T, ...)`.
        """
        steps, lanes = self.is_start.shape
        _checked(tensor, (1, lanes * steps), "(1, B * T, ...)", "unflatten_lanes")
        return tensor.reshape(lanes, steps, *tensor.shape[2:]).transpose(0, 1)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """`(T, B)` as `(B, T)`, in memory of its own, in that order."""
    return tensor.T.clone(memory_format=torch.contiguous_format)


def _checked(tensor: object, shape: tuple[int, ...], form: str, method: str) -> tuple[int, ...]:
    """`shape`, which the tensor's first dimensions must be."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{method} takes a tensor {form}, not a {type(tensor).__name__}; give each leaf by itself")
    if tuple(tensor.shape[:2]) != shape:
        raise ValueError(f"{method} takes a tensor {form} that begins with {shape}, and is given {tuple(tensor.shape)}")
    return shape
