"""Text that was decoded with the wrong table once (`schÃ¶n` for `schön`), set right by ftfy.

ftfy judges and repairs a string as a whole, so it is asked line by line: one good line of another script would
otherwise hide the bad ones from it. Lines of pure ASCII are never asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megalite.errors import UnavailableError
from megalite.texts import Patch, Texts


def encoding_patches(texts: Texts) -> list[Patch]:
    """What to replace, so that no line is mojibake.

    Raises:
        UnavailableError: ftfy is not installed.
    """
    try:
        from ftfy import fix_encoding
        from ftfy.badness import is_bad
    except ImportError as error:
        raise UnavailableError("fix_encoding needs ftfy: pip install 'megalite[data]', or turn it off") from error
    patches = []
    for document, start, end in _lines_beyond_ascii(texts):
        line = texts.buffer[start:end].tobytes().decode()
        if is_bad(line) and (fixed := fix_encoding(line)) != line:
            patches.append(Patch(document, start, end, fixed.encode()))
    return patches


def _lines_beyond_ascii(texts: Texts) -> Iterator[tuple[int, int, int]]:
    """Document, start and end in the buffer of each line that is not pure ASCII."""
    beyond = np.flatnonzero(texts.buffer >= 0x80)
    ends = np.flatnonzero(texts.buffer == ord("\n"))
    done = 0
    for place in _first_of_each_line(beyond, ends, texts.offsets):
        if place < max(done, texts.offsets[0]) or place >= texts.offsets[-1]:
            continue
        document = int(np.searchsorted(texts.offsets, place, side="right")) - 1
        number = int(np.searchsorted(ends, place))
        start = max(int(texts.offsets[document]), int(ends[number - 1]) + 1 if number else 0)
        done = min(int(texts.offsets[document + 1]), int(ends[number]) if number < ends.size else texts.buffer.size)
        yield document, start, done


def _first_of_each_line(beyond: np.ndarray, ends: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The first place of `beyond` in each line of each document."""
    line_and_document = np.searchsorted(ends, beyond) + np.searchsorted(offsets, beyond, side="right")
    return beyond[np.flatnonzero(np.diff(line_and_document, prepend=-1))]
