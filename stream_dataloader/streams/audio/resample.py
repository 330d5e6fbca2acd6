"""Conversion of rate and channels of samples, with the same bits wherever reading begins.

Guarantee: output j depends only on the inputs around j * p / q, the ratio of the rates, if the
input begins at a multiple of p (`restart`), early enough to fill the filter::

    inputs, p = 3      |  .  .  |  .  .  |  .  .  |        starting at any | gives
    outputs, q = 2     0    1   0    1   0    1   0        the same outputs
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import av.error
import av.filter
import numpy as np

__all__ = ["Converter", "Samples", "as_float", "layout_name", "output_length", "restart"]

Samples = np.ndarray[Any, np.dtype[np.float32]]

_FILTER_TAPS = 32  # libswresample's filter_size, at the lower of the two rates
_BLOCK_SAMPLES = 8192  # samples passed to the filter graph in one call
_PLANES = 8  # an AVFrame has room for 8 planes (AV_NUM_DATA_POINTERS): more channels come packed
_LAYOUTS = ("", "mono", "stereo", "2.1", "4.0", "5.0", "5.1", "6.1", "7.1")
_SAMPLE_TYPES: dict[str, tuple[Any, float, float]] = {
    "u8": (np.uint8, 2.0**-7, -1.0),
    "s16": (np.int16, 2.0**-15, 0.0),
    "s32": (np.int32, 2.0**-31, 0.0),
    "s64": (np.int64, 2.0**-63, 0.0),
    "flt": (np.float32, 1.0, 0.0),
    "dbl": (np.float64, 1.0, 0.0),
}


def as_float(frame: Any) -> Samples:
    """Return a decoded frame as float32 `(C, n)` with a full scale of -1 to 1."""
    name, planes, count = frame.format.name, frame.planes, frame.samples
    planar = name.endswith("p")
    channels = len(planes) if planar else frame.layout.nb_channels
    if (found := _SAMPLE_TYPES.get(name.removesuffix("p"))) is None:
        raise ValueError(f"its samples have format {name!r}, and {', '.join(_SAMPLE_TYPES)} can be read")
    dtype, scale, offset = found
    samples: Samples = np.empty((channels, count), np.float32)
    if not planar:
        samples[:] = np.frombuffer(planes[0], dtype, count * channels).reshape(count, channels).T
    elif channels > _PLANES:
        raise ValueError(f"it has {channels} channels in planes of their own, and {_PLANES} can be read")
    else:
        for channel, plane in enumerate(planes):
            samples[channel] = np.frombuffer(plane, dtype, count)
    if scale != 1.0:
        samples *= np.float32(scale)
    if offset:
        samples += np.float32(offset)
    return samples


def layout_name(count: int, name: str = "") -> str:
    """Return FFmpeg's name of a channel layout, or of a layout with `count` channels."""
    if name in ("", f"{count} channels"):
        return _LAYOUTS[count] if count < len(_LAYOUTS) else f"{count} channels"
    return name


def output_length(count: int, ratio: Fraction) -> int:
    """Return the number of output samples for `count` input samples."""
    return -(-count * ratio.numerator // ratio.denominator)


def restart(start: int, ratio: Fraction) -> tuple[int, int]:
    """Return the first input sample needed for the outputs from `start` on, and the number of outputs to skip."""
    if ratio == 1:
        return start, 0
    outputs, inputs = ratio.numerator, ratio.denominator
    blocks = max(0, (start * inputs // outputs - _filling(ratio)) // inputs)
    return blocks * inputs, start - blocks * outputs


def _filling(ratio: Fraction) -> int:
    """Return a number of inputs that certainly fills the filter."""
    return 2 * math.ceil(_FILTER_TAPS * max(Fraction(1), 1 / ratio)) + 64


class Converter:
    """Resampler and mixer of consecutive pieces, by FFmpeg. A single channel is copied to all."""

    def __init__(self, rates: tuple[int, int], layouts: tuple[str, str], channels: tuple[int, int]) -> None:
        self._rate, self._layout, self._channels = rates[0], layouts[0], channels[0]
        self._packed = channels[0] > _PLANES
        self._copies = channels[1] if channels[0] == 1 and channels[1] > 1 else 0
        target = layouts[0] if self._copies or channels[0] == channels[1] else layouts[1]
        self._ratio = Fraction(rates[1], rates[0])
        self._read = self._given = 0  # number of samples into the graph, and out of it
        changes = rates[0] != rates[1] or target != layouts[0]
        self._graph: Any = self._connected(rates, layouts[0], target) if changes else None
        self._staged: Samples = np.empty((channels[0], _BLOCK_SAMPLES), np.float32)
        self._count = 0

    def _connected(self, rates: tuple[int, int], layout: str, target: str) -> Any:
        if target != layout and layout.endswith("channels"):
            raise ValueError(f"what its {layout} are is not known; leave channels=None")
        kind = "flt" if self._packed else "fltp"
        outputs = Fraction(rates[1], rates[0]).numerator
        shift = max(10, (outputs - 1).bit_length())  # with too few filters, libswresample rounds the phases
        graph = av.filter.Graph()
        graph.threads = 1  # a forked worker would hang when it frees inherited threads
        try:
            source = f"sample_rate={rates[0]}:sample_fmt={kind}:channel_layout={layout}:time_base=1/{rates[0]}"
            made = f"{rates[1]}:out_chlayout={target}:out_sample_fmt={kind}:internal_sample_fmt=fltp:rematrix_maxval=1"
            made += f":exact_rational=1:filter_size={_FILTER_TAPS}:phase_shift={shift}"
            nodes = graph.add("abuffer", source), graph.add("aresample", made), graph.add("abuffersink")
            graph.link_nodes(*nodes).configure()
        except (av.error.FFmpegError, ValueError) as error:
            raise ValueError(f"{layout} at {rates[0]} cannot be made {target} at {rates[1]}") from error
        return graph

    def push(self, piece: Samples) -> Iterator[Samples]:
        """Add a piece `(C, n)`; yield the samples that are ready."""
        if self._graph is None:
            yield self._copied(piece)
            return
        begin = 0
        while begin < piece.shape[1]:
            count = min(piece.shape[1] - begin, _BLOCK_SAMPLES - self._count)
            self._staged[:, self._count : self._count + count] = piece[:, begin : begin + count]
            begin, self._count = begin + count, self._count + count
            if self._count == _BLOCK_SAMPLES:
                yield from self.flush()

    def flush(self) -> Iterator[Samples]:
        """Yield all samples that the pieces so far allow; more pieces may follow."""
        if self._count:
            samples, self._count = self._staged[:, : self._count], 0
            self._read += samples.shape[1]
            if self._packed:
                samples = samples.T.reshape(1, -1)
            kind = "flt" if self._packed else "fltp"
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format=kind, layout=self._layout)
            frame.sample_rate = self._rate
            self._graph.push(frame)
            yield from self._pulled()

    def end(self) -> Iterator[Samples]:
        """Yield the last samples by adding silence, because the graph's own flush gives too few."""
        if self._graph is None:
            return
        yield from self.flush()
        missing, silence = output_length(self._read, self._ratio) - self._given, _filling(self._ratio)
        while missing > 0 and silence > 0:
            block = np.zeros((self._channels, min(silence, _BLOCK_SAMPLES)), np.float32)
            silence -= block.shape[1]
            for samples in itertools.chain(self.push(block), self.flush()):
                yield samples[:, :missing]
                missing -= min(missing, samples.shape[1])

    def _pulled(self) -> Iterator[Samples]:
        while True:
            try:
                frame = self._graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            self._given += frame.samples
            yield self._copied(as_float(frame))

    def _copied(self, samples: Samples) -> Samples:
        return np.broadcast_to(samples, (self._copies, samples.shape[1])) if self._copies else samples
