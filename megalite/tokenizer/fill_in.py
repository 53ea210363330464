"""Fill-in-the-middle: texts taken apart so that a model learns to write what stands between two pieces of text.

    prefix, middle, suffix           a text cut at two places, each as likely as any other
    PSM   <pre> prefix <suf> suffix <mid> middle <eos>
    SPM   <pre> <suf> suffix <mid> prefix middle <eos>       its second variant, which shares tokens with PSM

As in Bavarian et al. 2022, "Efficient training of language models to fill in the middle": the cut is made between
characters, before there are tokens, and each of the three parts is encoded by itself, as it is when somebody asks. What
becomes of a text depends on the seed and on the text alone.

At the level of documents a whole document is taken apart, and may be cut by a border of sequences afterwards. At the
level of contexts it is first cut, between characters, into pieces that fill a sequence at most, and each is taken apart
or left by itself; pieces that are left and follow each other stay one text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import xxhash

from megalite.errors import DataError
from megalite.tokenizer.settings import FillInConfig
from megalite.tokenizer.tokenizer import Tokenizer

NUM_SENTINELS = 3

CHARS_A_TOKEN = 12
"""Characters looked at for each token of a context: more than a token has on average in any text that is read."""


def sentinel_ids(tokenizer: Tokenizer, config: FillInConfig) -> tuple[int, int, int]:
    """The ids of the control tokens before prefix, suffix and middle.

    Raises:
        DataError: the tokenizer has not got all of them.
    """
    ids = {token: tokenizer.control_tokens.get(token) for token in config.tokens.spellings}
    if missing := [token for token, id in ids.items() if id is None]:
        raise DataError(
            f"{tokenizer.folder}: has no control token {' and no '.join(missing)}, which fim needs; name those that "
            f"it has with fim.tokens, or train it with tokenizer.special_tokens={list(ids)}"
        )
    prefix, suffix, middle = (id for id in ids.values() if id is not None)
    return prefix, suffix, middle


class FillIn:
    """Makes token documents of texts, and counts them.

    Args:
        config: how many, in which order, at which level.
        seed: of the choice.
        seq_len: longest context; None at the level of documents.

    Raises:
        DataError: the tokenizer lacks a sentinel.
    """

    def __init__(self, tokenizer: Tokenizer, config: FillInConfig, *, seed: int, seq_len: int | None):
        self._tokenizer, self._config, self._seed, self._seq_len = tokenizer, config, seed, seq_len
        self._prefix, self._suffix, self._middle = sentinel_ids(tokenizer, config)
        self.counts: Counter[str] = Counter(fim_pieces=0, psm=0, spm=0)

    def encode(self, text: str) -> Iterator[list[int]]:
        """The token documents that a text becomes: one, or at the level of contexts several."""
        key = xxhash.xxh3_64_intdigest(text.encode(), seed=self._seed)
        if self._seq_len is None:
            self.counts["fim_pieces"] += 1
            taken = self._take_apart(text, key, 0)
            yield taken if taken is not None else [*self._tokenizer.encode(text), self._tokenizer.eos_id]
            return
        left, start, number = "", 0, 0
        while start < len(text):
            size, taken = self._context(text, start, key, number)
            if taken is None:
                left += text[start : start + size]
            else:
                if left:
                    yield self._tokenizer.encode(left)
                yield taken
                left = ""
            start, number = start + size, number + 1
            self.counts["fim_pieces"] += 1
        if left:
            yield [*self._tokenizer.encode(left), self._tokenizer.eos_id]

    def _context(self, text: str, start: int, key: int, number: int) -> tuple[int, list[int] | None]:
        """The characters of the next context, and its tokens if it is taken apart. It fits, with sentinels and end."""
        assert self._seq_len is not None
        room = self._seq_len - NUM_SENTINELS - 1
        size = min(len(text) - start, room * CHARS_A_TOKEN)
        while True:
            piece = text[start : start + size]
            found = len(self._tokenizer.encode(piece))
            if found <= room:
                before = self.counts.copy()
                taken = self._take_apart(piece, key, number)
                found = 0 if taken is None else len(taken) - NUM_SENTINELS - 1
                if found <= room or size == 1:
                    return size, taken
                self.counts = before
            elif size == 1:
                return size, None
            size = max(1, min(size - 1, size * room // found))

    def _take_apart(self, text: str, key: int, number: int) -> list[int] | None:
        """A text with a hole; None where it is left as it is."""
        if self._draw(key, number, 0) >= self._config.rate:
            return None
        cuts = sorted(int(self._draw(key, number, which) * (len(text) + 1)) for which in (1, 2))
        parts = text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]
        prefix, middle, suffix = self._tokenizer.encode_batch(parts)
        end = [*middle, self._tokenizer.eos_id]
        if self._draw(key, number, 3) < self._config.spm_rate:
            self.counts["spm"] += 1
            return [self._prefix, self._suffix, *suffix, self._middle, *prefix, *end]
        self.counts["psm"] += 1
        return [self._prefix, *prefix, self._suffix, *suffix, self._middle, *end]

    @staticmethod
    def _draw(key: int, number: int, which: int) -> float:
        """A number in [0, 1) for each use, 53 bits."""
        return (xxhash.xxh3_64_intdigest(f"{number}/{which}".encode(), seed=key) >> 11) * 2.0**-53
