"""Filling rows of a batch straight from the mapped token files: one compiled call for all rows of one source.

    which samples   [17, 4, 256]                           numbers in the source
                      |  pieces: read from the packed index, or found by bisection of the document borders
    token file      ..|a a a a a|b b b|c c c c..           any integer type, mapped
                      |  piece by piece: input ids, labels, positions, mask
    rows            tokens    a a a a a|b b b|             int64 [rows, seq_len]
                    labels    a a a a .|b b .|             the next token; none behind the last one of a document
                    positions 0 1 2 3 4|0 1 2|
                    weights   1 0 0 1 0|1 1 0|             of the labels, where the data has any; a label of 0 is none

Nothing is copied in between and no Python object is made for a document, so a core fills some hundreds of millions of
tokens a second; numpy, piece by piece, spends most of its time on the calls. What the rows must hold is said in
`sample.py`; a plain version of it stands in the tests.

The kernels check every piece before they follow it: a damaged index gives DAMAGED, not a read outside the file. This
module needs numba at import; import it where reading begins.
"""

from __future__ import annotations

import math

import numpy as np

from megalite.data.indexed import Stream
from megalite.data.sample import NO_DOCUMENT, NO_TOKEN, Cut, SampleRows
from megalite.kernel import kernel

DAMAGED = -1
"""Returned in place of the largest token when a piece points outside the stream or does not fit in its row."""

NEGATIVE = -2
"""Returned in its place when a token is below 0: a flipped bit in a file of a type with a sign."""


@kernel
def fill_packed(
    stream: Stream, cut: Cut, samples: np.ndarray, places: np.ndarray, rows: SampleRows, document_masks: bool
) -> int:
    """Fill rows with packed samples.

    Args:
        stream: the tokens.
        cut: their pieces.
        samples: int64 [n] numbers of samples.
        places: int64 [n] the row for each.
        rows: filled in these places.
        document_masks: documents do not see each other.

    Returns:
        The largest token read, or DAMAGED, or NEGATIVE.
    """
    largest = 0
    for number in range(samples.size):
        sample, row, place = samples[number], places[number], 0
        if sample < 0 or sample + 1 >= cut.borders.size:
            return DAMAGED
        start, length, document = 0, 0, 0
        for piece in range(cut.borders[sample], cut.borders[sample + 1]):
            if piece < 0 or piece >= cut.starts.size:
                return DAMAGED
            start, length, document = cut.starts[piece], np.int64(cut.lengths[piece]), cut.documents[piece]
            found = _fill_piece(stream, start, length, document, row, place, rows, document_masks)
            if found < 0:
                return found
            largest = max(largest, found)
            place += length
        if place == 0:
            return DAMAGED
        goes_on = start + length < _document_start(stream, document + 1)
        found = _finish_row(stream, start + length, goes_on, row, place, rows, document_masks)
        if found < 0:
            return NEGATIVE
        largest = max(largest, found)
    return largest


@kernel
def fill_concat(stream: Stream, samples: np.ndarray, places: np.ndarray, rows: SampleRows, document_masks: bool) -> int:
    """Fill rows with samples of the documents laid end to end; otherwise as `fill_packed`."""
    seq_len = rows.tokens.shape[1]
    largest = 0
    for number in range(samples.size):
        row = places[number]
        begin = samples[number] * seq_len
        stop = min(begin + seq_len, stream.tokens.size)
        if begin < 0 or begin >= stop:
            return DAMAGED
        document = _document_at(stream, begin)
        start, end = begin, begin
        while start < stop:
            if document >= stream.borders.size - 1:
                return DAMAGED
            end = _document_start(stream, document + 1)
            length = min(end, stop) - start
            if length > 0:
                found = _fill_piece(stream, start, length, document, row, start - begin, rows, document_masks)
                if found < 0:
                    return found
                largest = max(largest, found)
                start += length
            document += 1
        goes_on = stop < end or (not document_masks and stop < stream.tokens.size)
        found = _finish_row(stream, stop, goes_on, row, stop - begin, rows, document_masks)
        if found < 0:
            return NEGATIVE
        largest = max(largest, found)
    return largest


@kernel
def span_borders(positions: np.ndarray) -> np.ndarray:
    """Where the spans of attention of a stream begin and end.

    The last position of a span says how long it is, so the spans are walked from the end, without a look at the rest.

    Args:
        positions: int64 [t], counting up from 0 in each span.

    Returns:
        int32 [spans + 1], the first 0 and the last t.
    """
    num_spans, border = 0, positions.size
    while border > 0:
        border -= positions[border - 1] + 1
        num_spans += 1
    borders = np.empty(num_spans + 1, np.int32)
    border = positions.size
    for span in range(num_spans, 0, -1):
        borders[span] = border
        border -= positions[border - 1] + 1
    borders[0] = 0
    return borders


@kernel
def count_up(values: np.ndarray, firsts: np.ndarray) -> None:
    """Row n of values, int64 [rows, t], counts up from firsts[n]; in half the time that arange takes."""
    for row in range(values.shape[0]):
        column, first = values[row], firsts[row]
        for index in range(column.size):
            column[index] = first + index


def warm_up() -> None:
    """Call a kernel: before the first one of a process numba looks for all that extends it, a third of a second."""
    count_up(np.zeros((1, 1), np.int64), np.zeros(1, np.int64))


@kernel
def _fill_piece(
    stream: Stream, start: int, length: int, document: int, row: int, place: int, rows: SampleRows, document_masks: bool
) -> int:
    """Lay one piece into a row; its last label stays open, the one before the piece is closed where masks allow."""
    seq_len = rows.tokens.shape[1]
    if start < 0 or length < 1 or start + length > stream.tokens.size or place + length > seq_len:
        return DAMAGED
    if document < 0 or document >= stream.borders.size - 1:
        return DAMAGED
    source = stream.tokens[start : start + length]
    tokens = rows.tokens[row, place : place + length]
    labels = rows.labels[row, place : place + length]
    positions = rows.positions[row, place : place + length]
    first = 0 if document_masks else place
    largest = smallest = source[0]
    for index in range(length):
        largest = max(largest, source[index])
        smallest = min(smallest, source[index])
    if smallest < 0:
        return NEGATIVE
    for index in range(length):
        tokens[index] = source[index]
    for index in range(length - 1):
        labels[index] = source[index + 1]
    for index in range(length):
        positions[index] = first + index
    rows.loss_mask[row, place : place + length] = True
    labels[length - 1] = NO_TOKEN
    rows.loss_mask[row, place + length - 1] = False
    if rows.weights.size:
        for index in range(length - 1):
            _weigh(stream, start + index + 1, row, place + index, rows)
        rows.weights[row, place + length - 1] = 0.0
    if place > 0 and not document_masks:
        _put_label(stream, start, row, place - 1, rows)
    if rows.document_ids.size:
        rows.document_ids[row, place : place + length] = document
    return np.int64(largest)


@kernel
def _finish_row(
    stream: Stream, following: int, goes_on: bool, row: int, filled: int, rows: SampleRows, document_masks: bool
) -> int:
    """Close the last label of a row with the token at `following`, if the text goes on there, and pad the row."""
    seq_len = rows.tokens.shape[1]
    if filled < seq_len:
        first = 0 if document_masks else filled
        for index in range(seq_len - filled):
            rows.positions[row, filled + index] = first + index
        rows.tokens[row, filled:] = NO_TOKEN
        rows.labels[row, filled:] = NO_TOKEN
        rows.loss_mask[row, filled:] = False
        if rows.weights.size:
            rows.weights[row, filled:] = 0.0
        if rows.document_ids.size:
            rows.document_ids[row, filled:] = NO_DOCUMENT
    if not goes_on:
        return 0
    _put_label(stream, following, row, filled - 1, rows)
    return np.int64(stream.tokens[following])


@kernel
def _put_label(stream: Stream, following: int, row: int, place: int, rows: SampleRows) -> None:
    """Close the label at a place of a row with a token of the stream."""
    rows.labels[row, place] = stream.tokens[following]
    rows.loss_mask[row, place] = True
    if rows.weights.size:
        _weigh(stream, following, row, place, rows)


@kernel
def _weigh(stream: Stream, token: int, row: int, place: int, rows: SampleRows) -> None:
    """Give the label at a place, a token of the stream, its weight; take it away where that is 0."""
    weight = 1.0
    if stream.weights.size:
        weight = _from_half(stream.weights[token])
    rows.weights[row, place] = weight
    if weight == 0.0:
        rows.labels[row, place] = NO_TOKEN
        rows.loss_mask[row, place] = False


@kernel
def _from_half(bits: int) -> float:
    """A float16 from its bits: never negative, and finite."""
    exponent, fraction = np.int64(bits) >> 10, np.int64(bits) & 1023
    if exponent == 0:
        return math.ldexp(float(fraction), -24)
    return math.ldexp(float(1024 + fraction), exponent - 25)


@kernel
def _document_at(stream: Stream, position: int) -> int:
    """The document that holds a token: the last sequence that begins at or before it, then the document of that."""
    sequence = _last_at_most(stream.offsets, position * stream.tokens.itemsize)
    return _last_at_most(stream.borders, sequence)


@kernel
def _document_start(stream: Stream, document: int) -> int:
    """Where a document begins; the one behind the last begins at the end of the stream."""
    sequence = stream.borders[document]
    if sequence < 0 or sequence >= stream.offsets.size:
        return stream.tokens.size
    return min(stream.offsets[sequence] // stream.tokens.itemsize, stream.tokens.size)


@kernel
def _last_at_most(values: np.ndarray, limit: int) -> int:
    """Index of the last of some growing values that is <= limit, by bisection."""
    low, high = 0, values.size
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= limit:
            low = middle + 1
        else:
            high = middle
    return low - 1
