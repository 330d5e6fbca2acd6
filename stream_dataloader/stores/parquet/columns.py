"""Conversion of Arrow's columns to the values of items.

- numbers and booleans are not changed, in most cases without a copy;
- timestamps, dates, times and durations are int64, in the column's unit (dates: days);
- lists and tensors are arrays `(rows, n, ...)`, of one length;
- structs are dicts, and dictionaries are replaced by their values;
- strings, binary and lists of them are objects; images by `decode=`;
- decimals, maps, unions and intervals are refused.

Guarantee: only images and objects are handled row by row. A null never becomes a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._engine.items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.stream import put_row
from stream_dataloader.streams._media.limits import DEFAULT, Limits, may_unpack
from stream_dataloader.streams._media.targets import TARGET_DTYPE, put_targets

__all__ = [
    "Column",
    "Numbers",
    "Objects",
    "Source",
    "changes",
    "column_of",
    "decoded",
    "joined",
    "list_lengths",
]


class Source(NamedTuple):
    """Origin of a column, for errors, and options for reading it."""

    file: str
    column: str  # with dots
    row: int  # the file's row that is the column's first
    rows: int
    images: frozenset[str] = frozenset()  # the columns that hold encoded images
    pictures: Any = None  # decoder of images
    read_named: Any = None  # function that reads a picture's file, given its name, the table's, and its name in errors
    fill: Any = None  # value in place of nulls; None: nulls raise an error
    limits: Limits = DEFAULT

    def error(self, text: str, place: int = 0, places: int = 0) -> StoreError:
        """Return an error that names a row."""
        row = self.row + (place * self.rows // places if places else place)
        return StoreError(f"{self.file}, column {self.column!r}, row {row}: {text}")


class Numbers:
    """Numbers, `(rows, ...)`."""

    def __init__(self, array: NDArray[Any], source: Source) -> None:
        self.array = array
        self.source = source

    def row(self, row: int) -> Any:
        found = self.array[row]
        return found.copy() if isinstance(found, np.ndarray) else found

    def read(self, row: int, out: Any) -> None:
        """Write rows from `row` on to a batch's `(n, ...)`."""
        array = self.array
        if out.dtype != array.dtype or out.shape[1:] != array.shape[1:]:
            before = f"{out.dtype} {out.shape[1:]}"
            what = f"{array.dtype} {array.shape[1:]}"
            raise self.source.error(f"it is {what}, but the rows before it are {before}", row)
        out[...] = array[row : row + len(out)]


class Objects:
    """Arrow array of strings and other objects."""

    def __init__(self, array: Any, source: Source) -> None:
        self.array = array
        self.source = source

    def row(self, row: int) -> Any:
        try:
            return self.array[row].as_py()
        except (ValueError, OverflowError) as error:  # not UTF-8
            raise self.source.error(f"it cannot be read: {error}", row) from None

    def read(self, row: int, out: Any) -> None:
        for at in range(len(out)):
            put_row(self.row(row + at), out, at, self._name(row + at))

    def _name(self, row: int) -> str:
        return f"{self.source.file}, column {self.source.column!r}, row {self.source.row + row}"


class Images(Objects):
    """Arrow array of encoded images; `paths` has those that are in files."""

    def __init__(self, array: Any, source: Source, paths: Any = None) -> None:
        super().__init__(array, source)
        self._paths = paths

    def row(self, row: int, out: Any = None) -> Any:
        data = self.array[row].as_py()
        if data is None:
            path = None if self._paths is None else self._paths[row].as_py()
            if path is None:
                raise self.source.error("it is null; leave it out by columns=", row)
            data = self.source.read_named(path, self.source.file, self._name(row))
        return self.source.pictures.item(data, self._name(row), out)

    def read(self, row: int, out: Any) -> None:
        for place, room in enumerate(out, row):
            self.row(place, room)


Column = Numbers | Objects | dict[str, Any]


def column_of(array: Any, source: Source) -> Column:
    """Convert a column to numbers, objects, images, or a dict of columns."""
    import pyarrow as pa

    kind = pa.types
    if isinstance(array.type, pa.BaseExtensionType):
        return _extension(array, source)
    if kind.is_dictionary(array.type):
        source.limits.check_unpacked(array.nbytes, _decoded_bytes(array, source), f"{source.file}, {source.column!r}")
        return column_of(array.dictionary_decode(), source)
    is_image = source.column in source.images
    if is_image and kind.is_struct(array.type) and "bytes" in array.type.names:
        fields = dict(zip(array.type.names, array.flatten(), strict=True))
        return Images(fields["bytes"], source, fields.get("path"))
    array = _without_nulls(array, source)
    found = array.type
    if kind.is_struct(found):
        if not len(found.names) or len(set(found.names)) < len(found.names):
            raise source.error(f"a struct of {found.names}, which need names of their own")
        return {
            name: column_of(child, source._replace(column=f"{source.column}.{name}"))
            for name, child in zip(found.names, array.flatten(), strict=True)
        }
    if is_image:
        if "binary" not in str(found):
            raise source.error(f"it is of type {found}, and decode= takes columns of binary")
        return Images(array, source)
    if kind.is_list(found) or kind.is_large_list(found) or kind.is_fixed_size_list(found):
        return _list(array, source)
    if kind.is_boolean(found) or kind.is_integer(found) or kind.is_floating(found):
        return Numbers(array.to_numpy(zero_copy_only=False), source)
    if kind.is_temporal(found) and not kind.is_interval(found):
        numbers = array.view(f"int{found.bit_width}").cast("int64")
        return Numbers(numbers.to_numpy(zero_copy_only=False), source)
    if str(found).removeprefix("large_").startswith(("string", "binary", "fixed_size_binary")):
        return Objects(array, source)
    raise source.error(f"it is of type {found}, which is not read; leave it out by columns=")


def _decoded_bytes(array: Any, source: Source) -> int:
    """Return the bytes of an array once its dictionary's values replace the indices, or 0 if that is surely allowed."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values, kind = array.dictionary, pa.types
    if may_unpack(source.limits, array.nbytes, len(array) * values.nbytes):
        return 0
    if kind.is_list(values.type) or kind.is_large_list(values.type):
        inner = values.flatten()
        lengths, size = pc.list_value_length(values), inner.nbytes / max(1, len(inner))
    elif str(values.type).removeprefix("large_") in ("string", "binary"):
        lengths, size = pc.binary_length(values), 1.0
    else:
        return int(len(array) * values.nbytes / max(1, len(values)))
    return int((pc.sum(lengths.take(array.indices)).as_py() or 0) * size)


def _without_nulls(array: Any, source: Source) -> Any:
    if not array.null_count:
        return array
    import pyarrow as pa
    import pyarrow.compute as pc

    if source.fill is not None:
        try:
            return pc.fill_null(array, pa.scalar(source.fill, array.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise source.error(f"{array.null_count} nulls cannot be {source.fill!r}: {error}") from None
    place = pc.index(array.is_null(), True).as_py()
    images = source.column.rpartition(".")[0] or source.column
    text = f"it is null; leave it out by columns=, give fill_null=, or decode={{{images!r}: 'image'}}"
    raise source.error(text, place, len(array))


def _extension(array: Any, source: Source) -> Column:
    """Convert a column of tensors, which are lists with a shape."""
    found = column_of(array.storage, source)
    shape = getattr(array.type, "shape", None)
    if shape is None or None in shape or not isinstance(found, Numbers):
        return found
    order = getattr(array.type, "permutation", None)
    if order is not None and list(order) != list(range(len(order))):
        raise source.error(f"its axes are in the order {order}; write tensors in C order")
    return Numbers(found.array.reshape(len(array), *shape), source)


def _list(array: Any, source: Source) -> Column:
    import pyarrow as pa
    import pyarrow.compute as pc

    structure, leaves = flatten(column_of(array.flatten(), source))
    if not all(isinstance(leaf, Numbers) for leaf in leaves):
        return Objects(array, source)
    if pa.types.is_fixed_size_list(array.type):
        length = array.type.list_size
    else:
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        length = int(lengths[0]) if len(lengths) else 0
        if len(wrong := np.flatnonzero(lengths != length)):
            what = f"a list of {lengths[wrong[0]]} values, and those before it have {length}; pad them"
            raise source.error(what, int(wrong[0]), len(array))
    rows = [leaf.array.reshape(len(array), length, *leaf.array.shape[1:]) for leaf in leaves]
    found: Column = unflatten(structure, map(Numbers, rows, [leaf.source for leaf in leaves]))
    return found


def joined(column: Any) -> Any:
    """Return a column of a table as one array, without a copy if it has one chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def decoded(
    arrays: Mapping[str, Any],
    decode: Callable[[Any, Source], Column],
    file: str,
    row: int,
    lengths: NDArray[np.int64] | None = None,
    *,
    ignore_index: int | None = None,
) -> dict[str, Column]:
    """Convert columns from a row on. With `lengths`, convert the elements of their lists.

    With `ignore_index`, the result has inputs and targets.
    """
    columns = {}
    for name, array in arrays.items():
        array = array if lengths is None else array.flatten()  # noqa: PLW2901
        columns[name] = decode(array, Source(file, name, row, len(array)))
    if ignore_index is None or lengths is None:
        return columns
    name, tokens = next(iter(columns.items()))
    if len(columns) > 1 or not isinstance(tokens, Numbers) or tokens.array.dtype.kind not in "iu":
        raise StoreError(f"{file}: targets=True takes one column of tokens; choose it by columns=")
    target = np.empty(tokens.array.shape, TARGET_DTYPE)
    put_targets(target, tokens.array[1:], ignore_index, np.cumsum(lengths) - 1)
    return {"input": tokens, "target": Numbers(target, tokens.source)}


def list_lengths(arrays: Mapping[str, Any], file: str, row: int) -> NDArray[np.int64]:
    """Return the number of elements of each row, which must be the same in all columns."""
    import pyarrow.compute as pc

    found: dict[str, NDArray[np.int64]] = {}
    for name, array in arrays.items():
        if "list" not in str(array.type) or array.null_count:
            what = "has rows without one" if array.null_count else f"is of type {array.type}"
            raise StoreError(f"{file}: {name} {what}, and elements=True takes lists; choose columns")
        found[name] = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    first, *others = found.items()
    for name, lengths in others:
        if len(wrong := np.flatnonzero(lengths != first[1])):
            what = f"{first[0]} has {first[1][wrong[0]]} elements, and {name} {lengths[wrong[0]]}"
            raise StoreError(f"{file}, row {row + wrong[0]}: {what}; choose columns")
    return first[1]


def changes(array: Any, key: str, file: str) -> tuple[list[int], list[Any]]:
    """Return the rows at which a key changes, and their keys."""
    if array.null_count:
        import pyarrow.compute as pc

        raise StoreError(f"{file}, row {pc.index(array.is_null(), True).as_py()}: {key} is null")
    try:
        encoded = array if hasattr(array, "indices") else array.dictionary_encode()
    except NotImplementedError:
        raise StoreError(f"{file}: {key} is of type {array.type}, no key") from None
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
    return rows.tolist(), array.take(rows).to_pylist()
