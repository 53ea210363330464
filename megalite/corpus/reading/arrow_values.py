"""What the columns of an Arrow table hold, as columns that all functions take, and as values of Python."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
"""What holds the same as a type of strings, which readers of Parquet and Arrow do not check."""

PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with columns as all functions take them: texts that are views, or numbers of a dictionary, as texts."""
    kinds = batch.schema.types
    if not any(kind in PLAIN or pa.types.is_dictionary(kind) for kind in kinds):
        return batch
    columns = [each.dictionary_decode() if pa.types.is_dictionary(each.type) else each for each in batch.columns]
    cast = [each.cast(PLAIN.get(each.type, each.type)) for each in columns]
    return pa.RecordBatch.from_arrays(cast, batch.schema.names)


def with_readable_names(batch: pa.RecordBatch, text_field: str) -> pa.RecordBatch:
    """The batch with bytes that are no UTF-8 spelt out in every column but the text, whose rows are judged singly."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, column in columns.items():
        as_bytes = AS_BYTES.get(column.type)
        if name == text_field or as_bytes is None:
            continue
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            values = (value.as_py() for value in column.view(as_bytes))
            spelt = [None if value is None else value.decode(errors="backslashreplace") for value in values]
            columns[name] = pa.array(spelt, column.type)
    return pa.RecordBatch.from_pydict(columns)


def fields_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Its rows.

    Raises:
        UnicodeDecodeError: a text is no UTF-8; whoever knows which row it is puts that aside.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError):
        columns = dict(zip(batch.schema.names, map(values_of, batch.columns), strict=True))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def values_of(column: pa.Array) -> list[Any]:
    """Of a column; those that Python has not, as dates behind the year 9999, as Arrow spells them."""

    def value_of(scalar: pa.Scalar) -> Any:
        try:
            return scalar.as_py()
        except UnicodeDecodeError:
            raise
        except (OverflowError, ValueError):
            return pa.array([scalar], scalar.type).to_string(indent=0, skip_new_lines=True)[1:-1]

    return [value_of(scalar) for scalar in column]


def unpacked(value: Any) -> Any:
    """A table's row as a line of JSON would have it: structs without the fields that only other rows have."""
    if isinstance(value, dict):
        return {name: unpacked(each) for name, each in value.items() if each is not None}
    return [unpacked(each) for each in value] if isinstance(value, list) else value
