"""Decodes an episode: what was stored of its steps at once, and each step when it is read.

Guarantee: of an episode's record only the columns that are wanted are unpacked. Images and other encoded columns are
decoded one step at a time, as it is read; plain numbers are copied a window at a time.

TFDS's own parser and features decode it, by NumPy, as `as_data_source` does (checked with tensorflow-datasets 4.9.10).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.rows import RowSteps, Selection, selected
from stream_dataloader.stores._base.stream import put_row

__all__ = ["EpisodeReader"]


class EpisodeReader:
    """Which columns of the steps are wanted, and what decodes them.

    Args:
        features: The dataset's.
        path: The dataset, for errors.
        steps: The feature that holds the steps.
        columns: Which columns of a step; see `rows.selected`.
    """

    def __init__(self, features: Any, path: str, steps: str, columns: Sequence[str] | None) -> None:
        from tensorflow_datasets.core import example_parser

        nested = [name for name in _names(features) if hasattr(features[name], "feature")]
        if steps not in nested:
            raise StoreError(
                f"{path} has no feature {steps!r} of several steps; give stream= one of {nested}, of its features "
                f"{_names(features)}"
            )
        there = dict(_leaves(features[steps].feature))
        is_value = list(there) == [""] and not columns  # a step is one value
        self._selection = Selection("", [""]) if is_value else selected(columns, list(there), f"{path}, {steps}")
        info = features.get_serialized_info()
        self._steps = steps
        self._parser = example_parser.ExampleParserNp({steps: _picked(self._selection.item, info[steps])})
        self._decoders = [_Decoder(there[name]) for name in self._selection.names]
        self._rest = {name: _Decoder(features[name]) for name in _names(features) if name != steps}
        self._rest_parser = example_parser.ExampleParserNp({name: info[name] for name in self._rest})

    def episode(self, record: bytes, name: str) -> RowSteps:
        """The steps of a record, the bytes of an example; `name` is the stream's, for errors."""
        names = self._selection.names
        try:
            stored = self._parser.parse_example(record)[self._steps]
            columns = [
                _Column(_at(stored, one), decoder, name, one)
                for one, decoder in zip(names, self._decoders, strict=True)
            ]
        except Exception as error:
            raise StoreError(
                f"{name} does not fit the features in features.json ({type(error).__name__}: {error}); prepare the "
                "dataset anew"
            ) from error
        if len({len(column) for column in columns}) != 1:
            steps = dict(zip(names, map(len, columns), strict=True))
            raise StoreError(f"{name} is damaged: its columns have different numbers of steps, {steps}")
        return RowSteps(self._selection, columns)

    def metadata(self, record: bytes, name: str) -> Mapping[str, Any]:
        """The features of a record besides its steps, as plain values."""
        try:
            stored = self._rest_parser.parse_example(record)
            return {key: _plain(decoder.decode(stored[key])) for key, decoder in self._rest.items()}
        except Exception as error:
            raise StoreError(f"{name} has damaged metadata ({type(error).__name__}: {error})") from error


class _Decoder:
    """Decodes one feature: of a step, or of an episode."""

    def __init__(self, feature: Any) -> None:
        from tensorflow_datasets import features

        # Only a dict of features decodes sequences, at any depth.
        self._alone = features.FeaturesDict({"": feature})
        self._is_text = isinstance(feature, features.Text)
        self.shape: tuple[int, ...] | None = None
        decodes = getattr(type(feature), "decode_example_np", None)
        if isinstance(feature, features.Tensor) and decodes is features.Tensor.decode_example_np:
            self.shape = tuple(feature.shape)

    def decode(self, stored: Any) -> Any:
        value = self._alone.decode_example_np({"": stored})[""]
        if self._is_text and isinstance(value, bytes):
            return value.decode()
        if isinstance(value, list) and value and len({_kind(inner) for inner in value}) == 1:
            return np.array(value)  # a sequence within a step, of numbers or arrays that are alike
        if isinstance(value, np.ndarray) and not (value.flags.owndata and value.flags.writeable):
            return value.copy()
        return value


class _Column:
    """One column of all steps of an episode, as it was stored; a `tables.Table`."""

    def __init__(self, stored: Any, decoder: _Decoder, stream: str, name: str) -> None:
        if not isinstance(stored, (np.ndarray, list)):
            raise TypeError(f"a {type(stored).__name__} is no list of steps")
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
            raise StoreError(
                f"{self._stream}, step {index}{self._name}: it cannot be decoded ({type(error).__name__}: {error})"
            ) from error

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
    from tensorflow_datasets import features

    if not isinstance(feature, features.FeaturesDict):
        yield name, feature
        return
    for key in _names(feature):  # in features.json they have no order, and each process finds another one
        yield from _leaves(feature[key], f"{name}/{key}" if name else key)


def _picked(item: Any, nested: Any) -> Any:
    """What lies in a nested dict where an item has leaves."""
    return {key: _picked(below, nested[key]) for key, below in item.items()} if isinstance(item, dict) else nested


def _at(nested: Any, name: str) -> Any:
    for key in name.split("/") if name else ():
        nested = nested[key]
    return nested


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
