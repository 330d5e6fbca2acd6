"""Audio as windows of samples with one rate and number of channels.

Guarantee: item n has the same bits however it is reached. Damage is reported.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from stream_dataloader._engine.hints import hinted
from stream_dataloader.streams._media.container import choose_stream, open_container
from stream_dataloader.streams._media.limits import DEFAULT, Limits
from stream_dataloader.streams._media.section import (
    OnCorrupt,
    Section,
    check_numbers,
    check_options,
    closed_on_error,
    section_of,
    whole_number,
)
from stream_dataloader.streams.audio.decoding import AudioDecoder
from stream_dataloader.streams.audio.headers import declared_samples
from stream_dataloader.streams.audio.resample import Converter, Samples, layout_name, output_length, restart
from stream_dataloader.streams.cache import FileCache, LocalFile, open_local

__all__ = ["AudioStream", "SampleReader"]

_HIGHEST_RATE = 768_000
_AHEAD_SAMPLES = 16384  # samples read at once, for several windows


@hinted
@dataclass(frozen=True, kw_only=True)
class AudioStream:
    """Factory of streams from audio files: an item is a window of samples, float32 `(channels, window)`, -1 to 1.

    A source is a path, or `(path, start, stop)`: ints are samples at the output rate, floats are
    seconds. Item n begins at sample `n * hop`. All files that FFmpeg reads work, also the sound of videos.

    Args:
        window: Samples in an item, at the output rate.
        hop: Samples from the start of an item to the start of the next; None is `window`.
        rate: Samples per second to resample to; None keeps the file's own rate.
        channels: Number of channels to mix to, scaled so that nothing exceeds full scale. A single channel
            is copied to all. None keeps the file's own channels.
        pad_last: Whether the last samples that do not fill a window are an item, padded with zeros.
        track: Number of the file's audio track, from 0.
        on_corrupt: Action for damaged or missing data: `"raise"` an error; `"keep"` damaged frames and put
            silence in place of missing ones; or `"drop"` them. Only `"raise"` can seek.
        cache: Cache for files from URLs.
        limits: Largest ratio of the file's own rate and `rate`; see `Limits`. None: the defaults.

    Raises:
        ValueError: An option has an invalid value.

    Example:
        >>> import tempfile, wave
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = f"{folder.name}/silence.wav"
        >>> with wave.open(path, "wb") as file:
        ...     file.setparams((2, 2, 16000, 0, "NONE", ""))
        ...     file.writeframes(bytes(4 * 16000))
        >>> windows = AudioStream(window=800, hop=400, rate=8000, channels=1)
        >>> dataset = StreamDataset([path, (path, 0.5, 1.0)], windows, batch_size=2, time_steps=10)
        >>> [(tuple(batch.data.shape), batch.mask.sum().item()) for batch in StreamDataLoader(dataset)]
        [((10, 2, 1, 800), 19), ((10, 2, 1, 800), 9)]
        >>> windows.length(path)
        19
        >>> folder.cleanup()
    """

    _yields_steps: ClassVar[bool] = True
    open_early: ClassVar[bool] = True  # streams share nothing

    window: int
    hop: int | None = None
    rate: int | None = None
    channels: int | None = None
    pad_last: bool = True
    track: int = 0
    on_corrupt: OnCorrupt = "raise"
    cache: FileCache | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        check_options(self)
        check_numbers(
            self,
            window=("give 1 or more", 1),
            hop=("give 1 or more, or None for window", 1),
            rate=(f"give 1 to {_HIGHEST_RATE} samples a second, or None for the file's", 1, _HIGHEST_RATE),
            channels=("give 1 or more, or None for the file's", 1),
            track=("tracks are numbered from 0", 0),
        )

    def __call__(self, source: Any, *, start: int = 0) -> _Windows:
        """Open one source at item `start`, counted from the source's first item.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not a media file, or has no such track, or `start` is below 0.
        """
        section = section_of(source)
        start = whole_number("start", start, "items are numbered from 0", 0)
        local = open_local(section.path, self.cache)
        with closed_on_error(local):
            return _Windows(self, section._replace(path=local.path), start, local)

    def length(self, source: Any) -> int | None:
        """Return the number of items if a header or the source has it, else None."""
        section = section_of(source)
        if self.on_corrupt != "raise":
            return None
        rate, end = self.rate, None
        if rate is None or section.stop is None:
            with open_local(section.path, self.cache) as local, open_container(local.path) as container:
                stream = choose_stream(container, "audio", self.track)
                file_rate = stream.codec_context.sample_rate
                end = declared_samples(local.path, container, stream)
            if end is None and (section.stop is None or isinstance(section.start + section.stop, float)):
                return None
            rate = rate or file_rate
            end = None if end is None else output_length(end, Fraction(rate, file_rate))
        stop = end if section.stop is None else _number(section.stop, rate)
        return None if stop is None else self.items(max(0, stop - _number(section.start, rate)))

    def items(self, samples: int) -> int:
        """Return the number of windows that are cut from a number of samples."""
        hop = self.hop or self.window
        whole = 0 if samples < self.window else 1 + (samples - self.window) // hop
        if not self.pad_last:
            return whole
        left = samples - whole * hop  # these are an item if they add samples to the last one
        return whole + (left > (max(0, self.window - hop) if whole else 0))


class _Windows:
    """Stream of the windows of one source; a `protocols.ReadsInto`."""

    def __init__(self, options: AudioStream, section: Section, item: int, local: LocalFile) -> None:
        self._options = options
        self._section = section
        self._item = item
        self._local = local
        self._window = options.window
        self._hop: int = options.hop or options.window
        self._reader = SampleReader(section.path, options, section.start, item * self._hop)
        self._stop = None if section.stop is None else _number(section.stop, self._reader.rate)
        self._ended = False

    def __iter__(self) -> Iterator[Samples]:
        while True:
            item: Samples = np.empty((1, self._reader.channels, self._window), np.float32)
            if not self.read_into(item):
                return
            yield item[0]

    def read_into(self, out: Any) -> int:
        """Write the next windows to `out`, `(n, channels, window)`."""
        rows = out.numpy() if isinstance(out, torch.Tensor) else out
        written = 0
        while written < len(rows) and not self._ended:
            left = len(rows) - written
            wanted = max(self._window, min(_AHEAD_SAMPLES, (left - 1) * self._hop + self._window))
            if self._stop is not None:
                wanted = max(0, min(wanted, self._stop - self._reader.start - self._item * self._hop))
            held = self._reader.fill(wanted)
            if held >= self._window:
                count = min(left, 1 + (held - self._window) // self._hop)
                samples = self._reader.samples
                channel, sample = samples.strides
                shape = count, len(samples), self._window
                strides = self._hop * sample, channel, sample
                rows[written : written + count] = as_strided(samples, shape, strides, writeable=False)
                self._advance(count)
                written += count
            elif (error := (self._reader.error if held < wanted else None) or self._wrong_end()) is None:
                written += self._write_last(rows[written], held)
            elif written:
                break
            else:
                raise error
        return written

    def _advance(self, count: int) -> None:
        self._item += count
        self._reader.drop(count * self._hop)

    def _write_last(self, row: Samples, held: int) -> int:
        """Write the last window if it is an item; return the number of windows written."""
        self._ended = True
        known = max(0, self._window - self._hop) if self._item else 0
        if not self._options.pad_last or held <= known:
            return 0
        row[:, :held] = self._reader.samples[:, :held]
        row[:, held:] = 0
        self._advance(1)
        return 1

    def _wrong_end(self) -> ValueError | None:
        """Return the error to raise at the end if the file was too short for the source, else None."""
        length, start, stop, path = self._reader.length, self._reader.start, self._stop, self._section.path
        items = self._options.items(max(0, min(at for at in (length, stop) if at is not None) - start))
        if length is not None and max(start, stop or 0) > length and self._options.on_corrupt == "raise":
            return ValueError(f"{path} ends at sample {length}, {start} to {stop or 'the end'} was asked for")
        if self._item > items:
            return ValueError(f"{path} has {items} items, and was to be read from item {self._item} on")
        return None

    def close(self) -> None:
        self._reader.close()
        self._local.close()


class SampleReader:
    """Reader of one audio track; `samples`, `(channels, n)`, are those read and not dropped yet.

    The first sample wanted is `offset` samples after `start`, which is a number of samples, or seconds as a float.
    """

    def __init__(self, path: Any, options: Any, start: int | float = 0, offset: int = 0) -> None:
        self._may_be_cut = options.on_corrupt != "raise"
        self.decoder = AudioDecoder(path, options.track, options.on_corrupt)
        with closed_on_error(self):
            self.rate = options.rate or self.decoder.rate
            self.channels = options.channels or self.decoder.channels
            self.start_seconds = self.decoder.start_seconds
            self.start = round(start * self.rate) if isinstance(start, float) else int(start)
            self.length: int | None = None  # number of all samples at the output rate, once the end is reached
            (options.limits or DEFAULT).check_rates(self.decoder.rate, self.rate, str(path))
            self._ratio = Fraction(self.rate, self.decoder.rate)
            rates, channels = (self.decoder.rate, self.rate), (self.decoder.channels, self.channels)
            try:
                self._converter = Converter(rates, (self.decoder.layout, layout_name(self.channels)), channels)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            input_start, self._skipped = restart(self.start + offset, self._ratio)
            self._pieces = self._pieces_from(input_start)
            self.samples: Samples = np.empty((self.channels, 0), np.float32)
            self.error: Exception | None = None

    def _pieces_from(self, start: int) -> Iterator[Samples]:
        position = self.decoder.seek(start)
        for piece in self.decoder.pieces():
            skipped = min(max(0, start - position), piece.shape[1])
            position += piece.shape[1]
            if skipped < piece.shape[1]:
                yield piece[:, skipped:]
        if not self._may_be_cut:
            self.decoder.check_not_cut(position / self.decoder.rate)
        self.length = output_length(position, self._ratio)

    def fill(self, wanted: int) -> int:
        """Read until `samples` has `wanted` samples, or to the end, or to `error`; return their number."""
        found, missing = [self.samples], wanted - self.samples.shape[1]
        while missing > 0 and self.length is None and self.error is None:
            try:
                piece = next(self._pieces, None)
            except Exception as error:
                self.error = error
                made = self._converter.flush()
            else:
                made = self._converter.end() if piece is None else self._converter.push(piece)
            for samples in made:
                skipped = min(self._skipped, samples.shape[1])
                self._skipped -= skipped
                found.append(samples[:, skipped:])
                missing -= samples.shape[1] - skipped
        if len(found) > 1:
            self.samples = np.concatenate(found, axis=1)
        return min(wanted, int(self.samples.shape[1]))

    def drop(self, count: int) -> None:
        """Skip the next samples, whether they were read or not."""
        held = min(count, self.samples.shape[1])
        self.samples = self.samples[:, held:]
        self._skipped += count - held

    def close(self) -> None:
        self.decoder.close()


def _number(at: int | float, rate: int) -> int:
    """Return the number of a sample, given as a number or in seconds."""
    return round(at * rate) if isinstance(at, float) else operator.index(at)
