"""Find any of many phrases in one walk over the bytes: the automaton of Aho and Corasick (1975).

    phrases  he, she, hers          state      = the longest beginning of a phrase that ends at the byte just read
                                    step       = state x byte -> state, filled in for every byte: one look-up a byte
    root -h-> . -e-> HE -r-> . -s-> HERS
      \\--s-> . -h-> . -e-> SHE     shorter    = the next shorter phrase that ends here too: SHE -> HE

Thousands of phrases cost no more time than one. Bytes that no phrase holds share a column of `step`, so the table stays
small. It is flat, and a state is the place where its row begins: a step, for which the next one waits, is one addition
and one load. States in which phrases end come last, so that one comparison tells them.

Letters are compared without regard to case: A to Z exactly, letters beyond ASCII in the forms that the list's spelling,
lower, upper and capitalised case give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megalite.corpus.rules.characters import WORD, decode, start_of_last
from megalite.kernel import bare_kernel


class Phrases(NamedTuple):
    """The automaton. A state is a multiple of num_columns; 0 is the root."""

    num_columns: int
    first_end: int
    """From this state on phrases end."""
    columns: np.ndarray
    """uint8 [256]: the column of `steps` of each byte."""
    steps: np.ndarray
    """uint32 [states * num_columns]: the next state."""
    groups: np.ndarray
    """int32 [states]: flags of all phrases that end here, 0 for none. Here and below by state / num_columns."""
    lengths: np.ndarray
    """int32 [states]: bytes of the phrase that the state spells in full, 0 for none."""
    shorter: np.ndarray
    """uint32 [states]: the state of the next shorter phrase that ends here, 0 for none."""


def make_phrases(groups: Sequence[Sequence[str]]) -> Phrases:
    """The automaton of some groups of phrases; group g has the flag 1 << g."""
    spellings: dict[bytes, int] = {}
    for group, phrases in enumerate(groups):
        for phrase in phrases:
            for form in (phrase, phrase.lower(), phrase.upper(), phrase.capitalize(), phrase.title()):
                spelling = form.encode().lower()  # of bytes: A to Z alone
                spellings[spelling] = spellings.get(spelling, 0) | 1 << group
    used = sorted({byte for spelling in spellings for byte in spelling})
    columns = np.zeros(256, np.uint8)
    for column, byte in enumerate(used, 1):
        columns[byte] = column
        if ord("a") <= byte <= ord("z"):
            columns[byte - 32] = column
    children: list[dict[int, int]] = [{}]
    group_of, length_of = [0], [0]
    for spelling, group in spellings.items():
        state = 0
        for byte in spelling:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                group_of.append(0)
                length_of.append(0)
            state = children[state][byte]
        group_of[state] |= group
        length_of[state] = len(spelling)
    return _link(children, columns, group_of, length_of, len(used) + 1)


@bare_kernel
def count_phrases(
    buffer: np.ndarray, start: int, end: int, phrases: Phrases, classes: np.ndarray, whole_words: bool
) -> int:
    """At how many places between two bytes a phrase ends.

    Args:
        buffer: uint8, valid UTF-8 from `start` to `end`.
        phrases: what to look for.
        classes: `character_classes`.
        whole_words: count only where no character of a word touches the phrase.
    """
    columns, steps = phrases.columns, phrases.steps
    count, state, first_end = 0, np.uint64(0), np.uint64(phrases.first_end)
    for at in range(start, end):
        state = np.uint64(steps[state + columns[buffer[at]]])
        if state >= first_end and (
            not whole_words or _a_whole_word_ends(buffer, start, at + 1, end, state, phrases, classes)
        ):
            count += 1
    return count


@bare_kernel
def _a_whole_word_ends(
    buffer: np.ndarray, start: int, at: int, end: int, state: np.uint64, phrases: Phrases, classes: np.ndarray
) -> bool:
    """Whether one of the phrases that end before the byte `at` has no character of a word beside it."""
    if at < end and classes[decode(buffer, at)[0]] & WORD:
        return False
    while state:
        number = np.int64(state) // phrases.num_columns
        length = phrases.lengths[number]
        if length:
            begin = at - length
            if begin == start or not classes[decode(buffer, start_of_last(buffer, begin))[0]] & WORD:
                return True
        state = np.uint64(phrases.shorter[number])
    return False


def _link(
    children: list[dict[int, int]], columns: np.ndarray, groups: list[int], lengths: list[int], num_columns: int
) -> Phrases:
    """Fill in the steps of the tree of phrases, breadth first: a missing child is that of the longest proper suffix."""
    steps = np.zeros((len(children), num_columns), np.int32)
    suffix, shorter = [0] * len(children), [0] * len(children)
    waiting: deque[int] = deque([0])
    while waiting:
        state = waiting.popleft()
        if state:
            steps[state] = steps[suffix[state]]
            groups[state] |= groups[suffix[state]]
            shorter[state] = suffix[state] if lengths[suffix[state]] else shorter[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = int(steps[suffix[state], columns[byte]]) if state else 0
            waiting.append(child)
        for byte, child in children[state].items():
            steps[state, columns[byte]] = child
    order = np.argsort(np.array(groups) != 0, kind="stable")
    places = np.empty(len(order), np.uint32)
    places[order] = np.arange(len(order)) * num_columns
    return Phrases(
        num_columns=num_columns,
        first_end=num_columns * groups.count(0),
        columns=columns,
        steps=places[steps[order]].reshape(-1),
        groups=np.array(groups, np.int32)[order],
        lengths=np.array(lengths, np.int32)[order],
        shorter=places[np.array(shorter)[order]],
    )
