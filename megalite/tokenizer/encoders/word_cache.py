"""Tokenizers at the speed of a look-up: words met before are copied, new ones encoded and kept.

    text    |def| _foo|(|x|):\\n|  _return|            cut where no token reaches across (cuts.py, byte_level.py)
              |
              v  key: the bytes of a word of 8 bytes or less, a hash of a longer one
    front   [key | lengths | places | first two ids]   short words met last, in a core's own memory: 19 of 20 end here
    slots   [key | lengths | places | first two ids]   all words; one touch of far memory
                              |  |
    texts   ...longer_word...    ids ...17,4,93...     the bytes of long words, compared; ids when there are more

Text repeats itself: of a hundred words one or two are new. The cache never forgets single words; when it is full it is
emptied, which costs less than choosing. Ids do not depend on what it remembers.

Speed against memory: up to 65 MB a process.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.kernel import bare_kernel, read_only
from megalite.texts import Texts
from megalite.tokenizer.encoders.bpe import BPE_ROOM, encode_bpe, encode_byte_bpe
from megalite.tokenizer.encoders.byte_level import next_hard_word
from megalite.tokenizer.encoders.short_words import WORD_BYTES, eight_bytes, first_bytes, letters_size
from megalite.tokenizer.encoders.unigram import UNIGRAM_ROOM, encode_unigram
from megalite.tokenizer.encoders.vocabulary import BYTE_BPE, HARD, JOIN, UNIGRAM, VocabularyArrays

FRONT_ROWS = 2**14
"""512 kB, half of a core's own memory."""

FRONT_SHIFT = 44
"""The best mixed bits of a product are its upper ones."""

NUM_SLOTS = 2**20
"""A power of two; half of them are used before the cache is emptied."""

PACKED_BYTES = 8
"""Words up to here are their own key."""

LONGEST_WORD = 64
"""Longer ones are encoded every time: they seldom come back."""

ARENA_BYTES = 2**24
ARENA_IDS = 2**22

INLINE_IDS = 2

USUAL_WORD = 2**16
"""Longer ones get their room when they come: it is used by pages, and three times as large as their text."""

ROOM = max(BPE_ROOM, UNIGRAM_ROOM)

KEY, LENGTHS, PLACES, IDS = range(4)
"""Columns of a slot."""

LOW_32 = 0xFFFFFFFF

HASH_FACTOR = 0xFF51AFD7ED558CCD - 2**64
"""An odd number whose products spread well: from the finaliser of MurmurHash3."""


class Cache(NamedTuple):
    """The words met so far."""

    front: np.ndarray
    """int64 [FRONT_ROWS, 4]: copies of slots."""
    slots: np.ndarray
    """int64 [NUM_SLOTS, 4]; LENGTHS is bytes << 32 | ids, 0 in an empty slot; PLACES the same of the arenas."""
    texts: np.ndarray
    """uint8 arena."""
    ids: np.ndarray
    """int32 arena."""
    used: np.ndarray
    """int64 [3]: slots, bytes of the first arena, ids of the second."""


def empty_cache() -> Cache:
    """A cache that knows no word; its memory is taken as it fills."""
    return Cache(
        np.zeros((FRONT_ROWS, 4), np.int64),
        np.zeros((NUM_SLOTS, 4), np.int64),
        np.empty(ARENA_BYTES, np.uint8),
        np.empty(ARENA_IDS, np.int32),
        np.zeros(3, np.int64),
    )


class WordCacheEncoder:
    """Encodes by a vocabulary; ids equal those of its library.

    Args:
        pieces: the vocabulary.
    """

    name = "word-cache"

    def __init__(self, pieces: VocabularyArrays):
        self._pieces = pieces
        self._cache = empty_cache()

    def encode_texts(self, texts: Texts, dtype: np.dtype, eos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
        """See `Encoder`."""
        buffer = read_only(texts.buffer)
        out = np.empty(texts.num_bytes + len(texts) + 1, dtype)  # a token has a byte at least; unused memory is free
        lengths = np.empty(len(texts), np.int64)
        eos = -1 if eos_id is None else eos_id
        size = -USUAL_WORD
        while size < 0:  # the length of a word that did not fit into the room
            room = np.empty(ROOM * (1 - size), np.int64)
            size = encode_words(buffer, texts.offsets, self._pieces, self._cache, eos, room, out, lengths)
        return out[:size], lengths


@bare_kernel
def encode_words(
    buffer: np.ndarray,
    offsets: np.ndarray,
    pieces: VocabularyArrays,
    cache: Cache,
    eos_id: int,
    room: np.ndarray,
    out: np.ndarray,
    lengths_of: np.ndarray,
) -> int:
    """Encode texts word by word.

    Args:
        buffer: uint8, UTF-8.
        offsets: int64 [texts + 1].
        pieces: the model.
        cache: words met so far; grows.
        eos_id: id behind each text, or -1 for none.
        room: int64 [ROOM * (bytes of the longest word + 1)], to work in.
        out: [bytes + texts + 1] filled with ids.
        lengths_of: int64 [texts] filled with the number of ids of each.

    Returns:
        The number of all ids; or minus the bytes of a word that takes more room.
    """
    at = 0
    for text in range(offsets.size - 1):
        first_id = at
        at = _encode_text(buffer, offsets[text], offsets[text + 1], pieces, cache, room, out, at)
        if at < 0:
            return at
        if eos_id >= 0:
            out[at] = eos_id
            at += 1
        lengths_of[text] = at - first_id
    return at


@bare_kernel
def _encode_text(
    buffer: np.ndarray,
    start: int,
    stop: int,
    pieces: VocabularyArrays,
    cache: Cache,
    room: np.ndarray,
    out: np.ndarray,
    at: int,
) -> int:
    """Encode bytes start..stop-1 into out[at:]; the place behind the last id, or minus the bytes of too long a word."""
    front, slots, known_texts, known_ids = cache.front, cache.slots, cache.texts, cache.ids
    byte_ids, has_letters = pieces.byte_ids, pieces.algorithm == BYTE_BPE
    while start < stop:
        size = 0
        if has_letters and start + WORD_BYTES <= stop:
            word = eight_bytes(buffer, start)
            size = letters_size(word)
        if size > 0:
            key = np.int64(first_bytes(word, size))
        else:
            size = _word_end(buffer, start, stop, pieces) - start
            if size == 1 and has_letters:
                out[at] = byte_ids[buffer[start]]
                at += 1
                start += 1
                continue
            if size > LONGEST_WORD:
                if ROOM * (size + 1) > room.size:
                    return -size
                at = _encode_word(buffer, start, start + size, pieces, room, out, at)
                start += size
                continue
            key = _key(buffer, start, size)
        row = np.uint64(_mix(key, size) >> FRONT_SHIFT & (front.shape[0] - 1))
        if front[row, KEY] == key and front[row, LENGTHS] >> 32 == size:
            lengths, places, ids = front[row, LENGTHS], front[row, PLACES], front[row, IDS]
        else:
            slot = _find(slots, known_texts, buffer, start, size, key)
            if slots[slot, LENGTHS] == 0:
                slot = _learn(buffer, Word(start, size, key), slot, pieces, cache, room, out, at)
            lengths, places, ids = slots[slot, LENGTHS], slots[slot, PLACES], slots[slot, IDS]
            if size <= PACKED_BYTES:
                front[row, KEY], front[row, LENGTHS] = key, lengths
                front[row, PLACES], front[row, IDS] = places, ids
        at = _copy_ids(lengths & LOW_32, places & LOW_32, ids, known_ids, out, at)
        start += size
    return at


@bare_kernel
def _word_end(buffer: np.ndarray, start: int, stop: int, pieces: VocabularyArrays) -> int:
    """Where the word that begins at start ends; stop is the end of the text."""
    last, end, rule = np.int64(buffer[start]), start, JOIN
    while rule == JOIN:
        end += 1
        if end == stop:
            return end
        byte = np.int64(buffer[end])
        rule = np.int64(pieces.rules[last << 8 | byte])
        last = byte
    return next_hard_word(buffer, start, stop, pieces.classes) if rule == HARD else end


@bare_kernel
def _key(buffer: np.ndarray, start: int, size: int) -> int:
    """The bytes of a short word, the first one lowest; a hash of a long one."""
    if size <= PACKED_BYTES and start + WORD_BYTES <= buffer.size:
        return np.int64(first_bytes(eight_bytes(buffer, start), size))
    key = np.int64(0)
    if size <= PACKED_BYTES:
        for place in range(size):
            key |= np.int64(buffer[start + place]) << 8 * place
        return key
    for place in range(start, start + size):
        key = (key ^ np.int64(buffer[place])) * np.int64(HASH_FACTOR)
        key ^= key >> 32
    return key


@bare_kernel
def _mix(key: int, size: int) -> int:
    return (key + size) * np.int64(HASH_FACTOR)


@bare_kernel
def _find(slots: np.ndarray, texts: np.ndarray, buffer: np.ndarray, start: int, size: int, key: int) -> int:
    """The slot of a word, or the free one where it belongs."""
    mask = slots.shape[0] - 1
    mixed = _mix(key, size)
    slot = ((mixed >> 40) ^ (mixed >> 20)) & mask
    while slots[slot, LENGTHS] != 0:
        if (
            slots[slot, KEY] == key
            and slots[slot, LENGTHS] >> 32 == size
            and (size <= PACKED_BYTES or _same(buffer, start, texts, slots[slot, PLACES] >> 32, size))
        ):
            break
        slot = (slot + 1) & mask
    return slot


@bare_kernel
def _copy_ids(num_ids: int, place: int, first_two: int, known_ids: np.ndarray, out: np.ndarray, at: int) -> int:
    """Write the ids of a known word; the place behind them.

    Two are always written, the second perhaps to be written over: a processor guesses badly which words have one.
    """
    out[at] = first_two & LOW_32
    out[at + 1] = first_two >> 32
    for number in range(INLINE_IDS, num_ids):
        out[at + number] = known_ids[place + number]
    return at + num_ids


@bare_kernel
def _encode_word(
    buffer: np.ndarray, start: int, stop: int, pieces: VocabularyArrays, room: np.ndarray, out: np.ndarray, at: int
) -> int:
    if pieces.algorithm == BYTE_BPE:
        return encode_byte_bpe(buffer, start, stop, pieces, room, out, at)
    if pieces.algorithm == UNIGRAM:
        return encode_unigram(buffer, start, stop, pieces, room, out, at)
    return encode_bpe(buffer, start, stop, pieces, room, out, at)


class Word(NamedTuple):
    """A stretch of a text that is encoded by itself."""

    start: int
    size: int
    key: int
    """See `_key`."""


@bare_kernel
def _learn(
    buffer: np.ndarray,
    word: Word,
    slot: int,
    pieces: VocabularyArrays,
    cache: Cache,
    room: np.ndarray,
    out: np.ndarray,
    at: int,
) -> int:
    """Encode a word, with out[at:] to work in, and keep it in a free slot; which that was in the end."""
    start, size, key = word
    num_ids = _encode_word(buffer, start, start + size, pieces, room, out, at) - at
    if not _has_room(cache):
        cache.front[:] = 0
        cache.slots[:] = 0
        cache.used[:] = 0
        slot = _find(cache.slots, cache.texts, buffer, start, size, key)
    _keep(buffer, start, size, key, slot, cache, out[at : at + num_ids])
    return slot


@bare_kernel
def _same(buffer: np.ndarray, start: int, texts: np.ndarray, place: int, size: int) -> bool:
    for number in range(size):  # noqa: SIM110 - compiled code has no generators
        if buffer[start + number] != texts[place + number]:
            return False
    return True


@bare_kernel
def _has_room(cache: Cache) -> bool:
    """Whether one more word fits, however long."""
    return (
        2 * cache.used[0] < cache.slots.shape[0]
        and cache.used[1] + LONGEST_WORD <= cache.texts.size
        and cache.used[2] + LONGEST_WORD <= cache.ids.size
    )


@bare_kernel
def _keep(buffer: np.ndarray, start: int, size: int, key: int, slot: int, cache: Cache, ids: np.ndarray) -> None:
    """Write a word into a free slot."""
    slots, texts, known_ids, used = cache.slots, cache.texts, cache.ids, cache.used
    text_place, ids_place = used[1], used[2]
    if size > PACKED_BYTES:
        for number in range(size):
            texts[text_place + number] = buffer[start + number]
        used[1] += size
    if ids.size > INLINE_IDS:
        for number in range(ids.size):
            known_ids[ids_place + number] = ids[number]
        used[2] += ids.size
    slots[slot, KEY] = key
    slots[slot, LENGTHS] = size << 32 | ids.size
    slots[slot, PLACES] = text_place << 32 | ids_place
    slots[slot, IDS] = np.int64(ids[min(1, ids.size - 1)]) << 32 | np.int64(ids[0])
    used[0] += 1
