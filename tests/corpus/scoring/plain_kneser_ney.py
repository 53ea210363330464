"""Modified Kneser-Ney the slow way: strings, counters and a recursion, straight from the formulas."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

WORD = re.compile(r"[0-9A-Za-z\u00c0-\u1fff]+|[^\x00-\x20\x7f]")

START, END, UNKNOWN = "<s>", "</s>", "<unk>"


def plain_words(line: str) -> list[str]:
    """The words of a line."""
    folded = "".join("0" if char in "0123456789" else char.lower() if char.isascii() else char for char in line)
    return WORD.findall(folded)


def plain_lines(text: str) -> list[list[str]]:
    """The words of each line that has any."""
    return [words for line in text.split("\n") if (words := plain_words(line))]


class PlainKneserNey:
    """The model of some lines of words.

    Args:
        lines: the sample.
        order: longest n-gram.
        min_word_count: rarer words are unknown.
        prune: largest count that is dropped, for orders 2, 3, ...; the last holds for all above.
    """

    def __init__(self, lines: Sequence[list[str]], order: int, min_word_count: int = 1, prune: Sequence[int] = ()):
        counts = Counter(word for line in lines for word in line)
        self.order = order
        self.known = {word for word, count in counts.items() if count >= min_word_count}
        self.num_rare = len(counts) - len(self.known)
        self.vocabulary = [*sorted(self.known), END, UNKNOWN]
        self.raw: Counter[tuple[str, ...]] = Counter()
        for line in lines:
            padded = [START, *map(self.see, line), END]
            for length in range(1, order + 1):
                self.raw.update(tuple(padded[at : at + length]) for at in range(len(padded) - length + 1))
        del self.raw[(START,)]
        self.pruned = {
            gram
            for gram, count in self.raw.items()
            if prune and len(gram) > 1 and count <= prune[min(len(gram) - 2, len(prune) - 1)]
        }
        lefts = defaultdict(set)
        for gram in self.raw:
            lefts[gram[1:]].add(gram[0])
        self.adjusted = {
            gram: count if len(gram) == order or gram[0] == START else len(lefts[gram])
            for gram, count in self.raw.items()
        }
        self.after = defaultdict(list)
        for gram in self.adjusted:
            self.after[gram[:-1]].append(gram)
        self.discounts = {length: self._discounts(length) for length in range(1, order + 1)}

    def see(self, word: str) -> str:
        """The word, or the unknown one."""
        return word if word in self.known else UNKNOWN

    def _discounts(self, length: int) -> list[float]:
        t = Counter(count for gram, count in self.adjusted.items() if len(gram) == length)
        if not all(t[j] for j in (1, 2, 3, 4)):
            return [0.0, 0.5, 1.0, 1.5]
        y = t[1] / (t[1] + 2 * t[2])
        d = [0.0, 1 - 2 * y * t[2] / t[1], 2 - 3 * y * t[3] / t[2], 3 - 4 * y * t[4] / t[3]]
        return d if min(d[1:]) > 0 else [0.0, 0.5, 1.0, 1.5]

    def _discount(self, gram: tuple[str, ...]) -> float:
        return self.discounts[len(gram)][min(self.adjusted[gram], 3)]

    def backoff(self, context: tuple[str, ...]) -> float:
        """b(context)"""
        following = self.after[context]
        if not following:
            return 1.0
        left_over = sum(self.adjusted[gram] if gram in self.pruned else self._discount(gram) for gram in following)
        return left_over / sum(self.adjusted[gram] for gram in following)

    def probability(self, gram: tuple[str, ...]) -> float:
        """p(last word | words before), at most `order` words."""
        *_, word = gram
        context = gram[:-1]
        below = self.probability(gram[1:]) if context else 1.0 / len(self.vocabulary)
        own = 0.0
        if gram in self.adjusted and gram not in self.pruned:
            own = (self.adjusted[gram] - self._discount(gram)) / sum(
                self.adjusted[each] for each in self.after[context]
            )
        assert word != START
        return own + self.backoff(context) * below

    def perplexity(self, text: str) -> float:
        """Per word and line end; an unknown word is one of all rare ones."""
        total, count = 0.0, 0
        for line in plain_lines(text):
            padded = [START, *map(self.see, line), END]
            for end in range(2, len(padded) + 1):
                total -= math.log(self.probability(tuple(padded[max(0, end - self.order) : end])))
                if padded[end - 1] == UNKNOWN:
                    total += math.log(max(1, self.num_rare))
                count += 1
        return math.exp(total / count) if count else math.inf
