"""Comma- and tab-separated values, which say of no column what it holds: all are texts here.

Arrow would look at a file's beginning and take a column for numbers, which costs the rest of the file where a text
comes later, and leading zeros and the ends of long numbers where none does. Of a kept field a text that is a number
becomes one where nothing of its value is lost by that.
"""

from __future__ import annotations

import csv
import io
import json
import re
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
import pyarrow as pa

from megalite.errors import DataError

HEADER_BYTES = 1 << 20
"""In which the names of all columns are."""

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
"""As JSON has it."""
MOST_DIGITS = 300
"""Of a number; what is longer is a text."""


class Beginning:
    """The beginning of a file, and the file as it was.

    Args:
        file: what has been opened, at its start.
    """

    def __init__(self, file: BinaryIO | pa.NativeFile):
        self._first = file.read(HEADER_BYTES)
        self._others = file

    def followed_by(self, end: bytes) -> BinaryIO:
        """The file as it was, and something behind it."""
        return io.BufferedReader(_Joined(io.BytesIO(self._first), self._others, io.BytesIO(end)))

    @property
    def has_all_names(self) -> bool:
        """Whether the line with the names of the columns has an end."""
        return b"\n" in self._first or b"\r" in self._first

    def names(self, delimiter: str, path: str) -> list[str]:
        """Of the columns; none of an empty file.

        Raises:
            DataError: one is too long to be a name.
        """
        text = io.StringIO(self._first.decode("utf-8-sig", errors="replace"), newline="")
        try:
            return next((row for row in csv.reader(text, delimiter=delimiter) if row), [])
        except csv.Error as error:
            most = csv.field_size_limit()
            raise DataError(
                f"{path}: its first line has more than {most} characters where a column's name should be; write the "
                "names of the columns there"
            ) from error


class _Joined(io.RawIOBase):
    """Several files, one behind the other."""

    def __init__(self, *files: BinaryIO | pa.NativeFile):
        self._files = files

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        found = next((content for file in self._files if (content := file.read(len(room)))), b"")
        room[: len(found)] = found
        return len(found)


class End:
    """A row behind the last one of a table that cannot be one of it: it has more columns, and a random text.

    Args:
        delimiter: of columns.
        num_columns: of the table; 0 of one that has not even their names, which gets no end.
    """

    def __init__(self, delimiter: str, num_columns: int):
        self._row = delimiter.join([uuid4().hex] * (num_columns + 1))
        self._came = not num_columns
        self.content = f"\n{self._row}\n".encode() if num_columns else b""
        """What to put behind the file."""
        self.is_swallowed = False
        """Whether all was read, and it did not come out; known at the end."""

    def came_as(self, row: str | None) -> bool:
        """Whether a row of another number of columns is this one."""
        self._came |= row == self._row
        return row == self._row

    def looked_for_behind(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches of the table; behind them it must have come."""
        yield from batches
        self.is_swallowed = not self._came

    def taken_off(self, text: str) -> str:
        """A field or row without it."""
        return text.partition(f"\n{self._row}")[0]


def row_numbers(first: int, count: int, refused: Sequence[int]) -> np.ndarray:
    """Of so many rows, int64 [count], without those that were refused, whose numbers ascend."""
    left_out = refused[bisect_left(refused, first) :]
    return np.setdiff1d(np.arange(first, first + count + len(left_out)), left_out)[:count]


def typed(fields: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """A row with numbers for the texts that are numbers, and null for empty ones, in columns of these names."""
    return {name: _value(text) if name in names else text for name, text in fields.items()}


def _value(text: str | None) -> Any:
    if not text:
        return None
    if len(text) > MOST_DIGITS or NUMBER.fullmatch(text) is None:
        return text
    number = json.loads(text)
    is_same = Decimal(repr(number)) == Decimal(text) if abs(number) < float("inf") else False
    return number if is_same else text
