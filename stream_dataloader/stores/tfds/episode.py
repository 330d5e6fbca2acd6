"""Decodes an episode by TFDS's own parser and features, as `as_data_source` does (tensorflow-datasets 4.9.10).

Guarantee: only the columns that are wanted are unpacked. Images and other encoded columns are decoded one step at a
time, as it is read; plain numbers are copied a window at a time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.rows import RowSteps, Selection, check_lengths, selected
from stream_dataloader.stores._base.stream import put_row

__all__ = ["EpisodeReader"]


class EpisodeReader:
    """Decodes the steps that lie in a feature, and some columns of them."""

    def __init__(self, features: Any, path: str, steps: str, columns: Sequence[str] | None) -> None:
        from tensorflow_datasets.core.example_parser import ExampleParserNp

        names = _names(features)
        nested = [name for name in names if hasattr(features[name], "feature")]
        if steps not in nested:
            raise StoreError(f"{path} has no feature {steps!r} of several steps; give stream= one of {nested}")
        there = dict(_leaves(features[steps].feature))
        is_value = list(there) == [""] and not columns  # a step is one value
        self._selection = Selection("", [""]) if is_value else selected(columns, list(there), f"{path}, {steps}")
        info = features.get_serialized_info()
        self._steps = steps
        self._parser = ExampleParserNp({steps: _picked(self._selection.item, info[steps])})
        self._decoders = {name: _Decoder(there[name]) for name in self._selection.names}
        self._rest = {name: _Decoder(features[name]) for name in names if name != steps}
        self._rest_parser = ExampleParserNp({name: info[name] for name in self._rest})

    def episode(self, record: bytes, name: str) -> RowSteps:
        """The steps of a record, the bytes of an example; `name` is the stream's, for errors."""
        with damage_named(f"{name}, by features.json,"):
            stored = self._parser.parse_example(record)[self._steps]
            columns = {
                one: _Column(
                    functools.reduce(operator.getitem, one.split("/") if one else (), stored), decoder, name, one
                )
                for one, decoder in self._decoders.items()
            }
            check_lengths(name, {one: len(column) for one, column in columns.items()})
        return RowSteps(self._selection, list(columns.values()))

    def metadata(self, record: bytes, name: str) -> Mapping[str, Any]:
        """The features of a record besides its steps, as plain values."""
        with damage_named(f"{name}, its metadata,"):
            stored = self._rest_parser.parse_example(record)
            return {key: _plain(decoder.decode(stored[key])) for key, decoder in self._rest.items()}


class _Decoder:
    """Decodes one feature: of a step, or of an episode."""

    def __init__(self, feature: Any) -> None:
        from tensorflow_datasets import features

        # Only a dict of features decodes sequences, at any depth.
        self._alone = features.FeaturesDict({"": feature})
        self._is_text = isinstance(feature, features.Text)
        decodes = getattr(type(feature), "decode_example_np", None)
        is_plain = isinstance(feature, features.Tensor) and decodes is features.Tensor.decode_example_np
        self.shape: tuple[int, ...] | None = tuple(feature.shape) if is_plain else None

    def decode(self, stored: Any) -> Any:
        value = self._alone.decode_example_np({"": stored})[""]
        if self._is_text and isinstance(value, bytes):
            return value.decode()
        if isinstance(value, list) and len({_kind(inner) for inner in value}) == 1:
            return np.array(value)  # a sequence within a step, of numbers or arrays that are alike
        if isinstance(value, np.ndarray) and not (value.flags.owndata and value.flags.writeable):
            return value.copy()
        return value


class _Column:
    """One column of all steps of an episode, as it was stored; a `tables.Table`."""

    def __init__(self, stored: Any, decoder: _Decoder, stream: str, name: str) -> None:
        self._stored = stored
        self._decoder = decoder
        self._stream = stream
        self._name = f", {name}" if name else ""
        self._plain: NDArray[Any] | None = None  # `(steps, ...)`, if nothing is left to decode
        if isinstance(stored, np.ndarray) and stored.dtype.kind in "biufc" and stored.shape[1:] == decoder.shape:
            self._plain = stored

    def __len__(self) -> int:
        return len(self._stored)

    def row(self, index: int) -> Any:
        if self._plain is not None:
            return np.array(self._plain[index])[()]
        try:
            return self._decoder.decode(self._stored[index])
        except Exception as error:
            where = f"{self._stream}, step {index}{self._name}"
            raise StoreError(f"{where} cannot be decoded ({type(error).__name__}: {error})") from error

    def read(self, start: int, out: Any) -> None:
        if self._plain is not None:
            out[...] = self._plain[start : start + len(out)]
            return
        for t in range(len(out)):
            put_row(self.row(start + t), out, t, f"{self._stream}, step {start + t}{self._name}")

    def close(self) -> None:
        self._stored, self._plain = [], None


def _kind(value: Any) -> Any:
    """Dtype and shape; something unlike all others if it has none."""
    return (value.dtype, value.shape) if isinstance(value, (np.generic, np.ndarray)) else object()


def _names(features: Any) -> list[str]:
    return sorted(features.keys()) if callable(getattr(features, "keys", None)) else []


def _leaves(feature: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested features, their names joined by "/": a sequence in a step is one."""
    from tensorflow_datasets.core.features import FeaturesDict

    if not isinstance(feature, FeaturesDict):
        yield name, feature
        return
    for key in _names(feature):  # in features.json they have no order
        yield from _leaves(feature[key], f"{name}/{key}" if name else key)


def _picked(item: Any, nested: Any) -> Any:
    """What lies in a nested dict where an item has leaves."""
    return {key: _picked(below, nested[key]) for key, below in item.items()} if isinstance(item, dict) else nested


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
