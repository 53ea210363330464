"""Tokens as text while they come: what is certain is handed on at once, what may still change is held back.

Held back are bytes of a character whose others are yet to come (decoders write U+FFFD for them), all bytes in a row
where tokens are bytes (SentencePiece decodes them together, or none of them), and an end that may become a stop string.
So what was handed on, put together, is what all tokens decode to, up to the first stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """One text.

    Args:
        decode: ids to text.
        stops: texts that end it, and are no part of it.
        is_byte: whether a token is a byte by itself.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        is_byte: Callable[[int], bool] = lambda token: False,
    ):
        self._decode, self._stops, self._is_byte = decode, stops, is_byte
        self._ids: list[int] = []
        self._handed_on = 0
        self.stopped_by: str | None = None
        """The stop string that was met."""

    def push(self, token: int) -> str:
        """Take a token; returns the text that has become certain."""
        self._ids.append(token)
        if self._is_byte(token):
            return ""
        return self._hand_on(self._decode(self._ids).rstrip(UNFINISHED), is_last=False)

    def finish(self) -> str:
        """No more tokens come: what was held back."""
        return "" if self.stopped_by is not None else self._hand_on(self._decode(self._ids), is_last=True)

    def _hand_on(self, text: str, *, is_last: bool) -> str:
        start = max(0, self._handed_on)
        found = [(place, stop) for stop in self._stops if (place := text.find(stop, start)) >= 0]
        if found:
            end, self.stopped_by = min(found)
        else:
            end = len(text) - (0 if is_last else self._possible_stop(text))
        piece = text[start:end]
        self._handed_on = max(start, end)
        return piece

    def _possible_stop(self, text: str) -> int:
        """Characters at a text's end that begin a stop string."""
        return max(
            (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
