"""Decodes an episode: what was stored of its steps at once, and each step when it is read.

Guarantee: of an episode's record only the leaves that are wanted are unpacked. Images and other encoded leaves are
decoded one step at a time, as it is read; plain numbers are copied a window at a time.

A record is a `tf.train.Example`: flat lists of numbers and byte strings by name, all steps of a leaf in one list.
TFDS's own parser and features decode it, by NumPy, as `as_data_source` does (checked with tensorflow-datasets 4.9.10).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader._items.layout import as_array
from stream_dataloader.errors import StoreError

__all__ = ["Episode", "EpisodeReader"]

_SEPARATOR = "/"


class EpisodeReader:
    """Which leaves of the steps are wanted, and what decodes them.

    Args:
        features: The dataset's.
        path: The dataset, for errors.
        steps: The feature that holds the steps.
        leaves: Which leaves of a step, by their names joined by "/"; that of a dict is all below it. None: all.

    Raises:
        StoreError: There is no such feature or leaf.
    """

    def __init__(self, features: Any, path: str, steps: str, leaves: Sequence[str] | None) -> None:
        from tensorflow_datasets.core import example_parser

        names = [name for name in _names(features) if hasattr(features[name], "feature")]
        if steps not in names:
            raise StoreError(
                f"{path} has no feature {steps!r} of several steps; give steps= one of {names}, of its features "
                f"{list(_names(features))}"
            )
        self._steps = steps
        found = {keys: feature for keys, feature in _leaves(features[steps].feature) if _is_wanted(keys, leaves)}
        for name in leaves if leaves is not None else ():
            if not any(_is_below(keys, name) for keys in found):
                there = [_SEPARATOR.join(keys) for keys, _ in _leaves(features[steps].feature)]
                raise StoreError(f"{path} has no leaf {name!r} in its {steps}; it has {there}")
        if not found:
            raise StoreError(f"{path} has no leaf in its {steps}; leaves is {leaves}")
        info = features.get_serialized_info()
        parts = [(keys, _at(info[steps], keys)) for keys in found]
        self._parser = example_parser.ExampleParserNp({steps: _nested(parts)})
        self._decoders = {keys: _Decoder(feature) for keys, feature in found.items()}
        rest = {name: features[name] for name in _names(features) if name != steps}
        self._rest = {name: _Decoder(feature) for name, feature in rest.items()}
        self._rest_parser = example_parser.ExampleParserNp({name: info[name] for name in rest})

    def episode(self, record: bytes, name: str) -> Episode:
        """The steps of a record.

        Args:
            record: The bytes of an example.
            name: The stream's, for errors.

        Raises:
            StoreError: It is damaged.
        """
        try:
            stored = self._parser.parse_example(record)[self._steps]
            columns = {keys: _Column(_at(stored, keys), decoder) for keys, decoder in self._decoders.items()}
        except Exception as error:
            raise StoreError(
                f"{name} does not fit the features in features.json ({type(error).__name__}: {error}); prepare the "
                "dataset anew"
            ) from error
        steps = {_SEPARATOR.join(keys): len(column) for keys, column in columns.items()}
        if len(set(steps.values())) != 1:
            raise StoreError(f"{name} is damaged: its leaves have different numbers of steps, {steps}")
        return Episode(columns, name)

    def metadata(self, record: bytes, name: str) -> Mapping[str, Any]:
        """The features of a record besides its steps, as plain values.

        Raises:
            StoreError: It is damaged.
        """
        try:
            stored = self._rest_parser.parse_example(record)
            return {key: _plain(decoder.decode(stored[key])) for key, decoder in self._rest.items()}
        except Exception as error:
            raise StoreError(f"{name} has damaged metadata ({type(error).__name__}: {error})") from error


class Episode:
    """The steps of one episode; see `_base.stream.Steps`."""

    def __init__(self, columns: Mapping[tuple[str, ...], _Column], name: str) -> None:
        self._columns = columns
        self._name = name
        self._steps = len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self._steps

    def item(self, index: int) -> Any:
        return _nested([(keys, self._value(keys, column, index)) for keys, column in self._columns.items()])

    def read(self, start: int, out: Any) -> None:
        for keys, column in self._columns.items():
            leaf = _at(out, keys)
            rows = as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf
            if column.plain is not None:
                rows[...] = column.plain[start : start + len(rows)]
                continue
            for t in range(len(rows)):
                value = np.asarray(self._value(keys, column, start + t))
                if value.shape != rows.shape[1:] or value.dtype != rows.dtype:
                    raise ValueError(
                        f"{self._name}, step {start + t}: {_SEPARATOR.join(keys)} is {value.dtype} {value.shape}, and "
                        f"was {rows.dtype} {rows.shape[1:]} before, as all steps must be"
                    )
                rows[t] = value

    def _value(self, keys: tuple[str, ...], column: _Column, index: int) -> Any:
        try:
            return column.value(index)
        except Exception as error:
            leaf = f", {_SEPARATOR.join(keys)}" if keys else ""
            raise StoreError(
                f"{self._name}, step {index}{leaf}: it cannot be decoded ({type(error).__name__}: {error})"
            ) from error

    def close(self) -> None:
        self._columns = {}


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
    """One leaf of all steps of an episode, as it was stored.

    Attributes:
        plain: The numbers themselves, `(steps, ...)`, if nothing is left to decode.
    """

    def __init__(self, stored: Any, decoder: _Decoder) -> None:
        if not isinstance(stored, (np.ndarray, list)):
            raise TypeError(f"a {type(stored).__name__} is no list of steps")
        self._stored = stored
        self._decoder = decoder
        self.plain: NDArray[Any] | None = None
        if isinstance(stored, np.ndarray) and stored.dtype.kind in "biufc" and stored.shape[1:] == decoder.shape:
            self.plain = stored

    def __len__(self) -> int:
        return len(self._stored)

    def value(self, index: int) -> Any:
        """One step's; nothing of the column stays open for it."""
        if self.plain is not None:
            return np.array(self.plain[index])[()]
        return self._decoder.decode(self._stored[index])


def _kind(value: Any) -> Any:
    """Dtype and shape; something unlike all others if it has none."""
    return (value.dtype, value.shape) if isinstance(value, (np.generic, np.ndarray)) else object()


def _names(features: Any) -> Iterator[str]:
    return iter(sorted(features.keys()) if callable(getattr(features, "keys", None)) else ())


def _leaves(feature: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of nested features: a sequence in a step is one."""
    from tensorflow_datasets import features

    if not isinstance(feature, features.FeaturesDict):
        yield keys, feature
        return
    for name in sorted(feature.keys()):  # in features.json they have no order, and each process finds another one
        yield from _leaves(feature[name], (*keys, name))


def _is_below(keys: tuple[str, ...], name: str) -> bool:
    return (_SEPARATOR.join(keys) + _SEPARATOR).startswith(name + _SEPARATOR)


def _is_wanted(keys: tuple[str, ...], leaves: Sequence[str] | None) -> bool:
    return leaves is None or any(_is_below(keys, name) for name in leaves)


def _at(nested: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        nested = nested[key]
    return nested


def _nested(values: Sequence[tuple[tuple[str, ...], Any]]) -> Any:
    """Dicts in dicts; the value itself if there is but one without a name."""
    if len(values) == 1 and not values[0][0]:
        return values[0][1]
    found: dict[str, Any] = {}
    for keys, value in values:
        inner = found
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return found


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
