"""Samples of an audio stream from any place on: bit for bit those that reading from the beginning gives."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from stream_dataloader.streams._media.section import closed_on_error
from stream_dataloader.streams.audio.decoding import AudioDecoder
from stream_dataloader.streams.audio.resample import Converter, Samples, layout_name, output_length, restart

__all__ = ["SampleReader"]


class SampleReader:
    """Reads one audio stream of a file; what was read and not dropped yet are `samples`, `(channels, n)`.

    `options` is an `AudioStream`. `start` is a sample's number at the output rate, or seconds as a float; the first
    sample wanted is `offset` behind it.
    """

    def __init__(self, path: Any, options: Any, start: int | float = 0, offset: int = 0) -> None:
        self._may_be_cut = options.on_corrupt != "raise"
        self.decoder = AudioDecoder(path, options.stream, options.on_corrupt)
        with closed_on_error(self):
            self.rate = options.rate or self.decoder.rate
            self.channels = options.channels or self.decoder.channels
            self.start_seconds = self.decoder.start_seconds
            self.start = round(start * self.rate) if isinstance(start, float) else int(start)
            self.length: int | None = None  # samples in all, at the output rate, once the end is reached
            self._ratio = Fraction(self.rate, self.decoder.rate)
            rates, channels = (self.decoder.rate, self.rate), (self.decoder.channels, self.channels)
            try:
                self._converter = Converter(rates, (self.decoder.layout, layout_name(self.channels)), channels)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            input_start, self._skipped = restart(self.start + offset, self._ratio)
            self._pieces = self._pieces_from(input_start)
            self.samples: Samples = np.empty((self.channels, 0), np.float32)
            self._error: Exception | None = None

    def _pieces_from(self, start: int) -> Iterator[Samples]:
        """Decoded pieces from an input sample on, each following on the one before."""
        position = self.decoder.seek(start)
        for piece in self.decoder.pieces():
            skipped = min(max(0, start - position), piece.shape[1])
            position += piece.shape[1]
            if skipped < piece.shape[1]:
                yield piece[:, skipped:]
        if not self._may_be_cut:
            self.decoder.check_not_cut(position / self.decoder.rate)
        self.length = output_length(position, self._ratio)

    def fill(self, wanted: int) -> None:
        """Read until `samples` has so many, or to the end, or to an error."""
        found, missing = [self.samples], wanted - self.samples.shape[1]
        while missing > 0 and self.length is None and self._error is None:
            try:
                piece = next(self._pieces, None)
            except Exception as error:
                self._error = error
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
        if missing > 0 and self._error is not None:
            raise self._error

    def drop(self, count: int) -> None:
        """Leave out the next samples, whether they were read or not."""
        held = min(count, self.samples.shape[1])
        self.samples = self.samples[:, held:]
        self._skipped += count - held

    def close(self) -> None:
        """Close the file; also a second time."""
        self.decoder.close()
