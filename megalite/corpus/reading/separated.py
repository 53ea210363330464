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
from collections.abc import Container, Sequence
from decimal import Decimal
from typing import Any, BinaryIO

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
        self.file: BinaryIO | pa.NativeFile = file
        if isinstance(file, pa.NativeFile):
            file.seek(0)
        else:
            self.file = io.BufferedReader(_Joined(self._first, file))

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
    """What was read already, and what follows."""

    def __init__(self, first: bytes, others: BinaryIO | pa.NativeFile):
        self._first, self._others = io.BytesIO(first), others

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        found = self._first.read(len(room)) or self._others.read(len(room))
        room[: len(found)] = found
        return len(found)


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
