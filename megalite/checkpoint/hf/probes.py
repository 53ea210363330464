"""What a converted model is asked: sequences for its logits, texts for its tokenizer. The same every time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from megalite.architecture.architecture import Architecture

LONGEST = 512
"""Tokens of the longest plain sequence; logits of 128k-token vocabularies then take a quarter of a GB."""

STRETCHED = 64
"""Tokens of the sequence whose positions reach to the last one."""

EVERY_ID_UP_TO = 4096
"""Vocabularies up to this size are run whole; of larger ones a random part. All rows are compared bit by bit anyway."""

SEED = 20240229


@dataclass(frozen=True)
class Probe:
    """Tokens and the position of each."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]


def make_probes(model: Architecture) -> list[Probe]:
    """Random sequences for a filled model.

    Short and long ones, one longer than a sliding window where the model has one, one whose positions are spread to the
    model's last (where a wrong rotary scaling shows), and every id once when the vocabulary is small.
    """
    generator = torch.Generator().manual_seed(SEED)
    longest = min(model.max_positions, LONGEST)
    lengths = {1, min(2, longest), min(33, longest), longest}
    window = model.sliding_window
    if window is not None and longest <= window < model.max_positions:
        lengths.add(min(window + STRETCHED, model.max_positions))
    sequences = [_plain(_draw(model, length, generator)) for length in sorted(lengths)]
    if model.max_positions > longest:
        last = model.max_positions - 1
        spread = tuple(index * last // (STRETCHED - 1) for index in range(STRETCHED))
        sequences.append(Probe(_draw(model, STRETCHED, generator), spread))
    if model.vocab_size <= EVERY_ID_UP_TO:
        ids = torch.randperm(model.vocab_size, generator=generator)
        sequences += [_plain(tuple(part.tolist())) for part in ids.split(longest)]
    return sequences


def _draw(model: Architecture, length: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(model.vocab_size, (length,), generator=generator).tolist())


def _plain(tokens: tuple[int, ...]) -> Probe:
    return Probe(tokens, tuple(range(len(tokens))))


KNOWN_TEXTS = (
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "Hello world",
    " Hello  world   again    ",
    "\n",
    "\n\n\n",
    "\t",
    "\t\tindented\t",
    "\r\n",
    "line\r\nline\rline\n",
    "    def f(x):\n        return x  # four and eight\n\n\n",
    "don't, won't, it's, I'LL",
    "CamelCase snake_case kebab-case SHOUT",
    "0 1 12 123 1234 12345 3.14159 1e-10 0xFF 1,000,000",
    "!@#$%^&*()_+-=[]{}|;':\",./<>?`~\\",
    "-" * 77 + "\n" + "=" * 77,
    " " * 300,
    "\n" * 300,
    "a" * 300,
    "ab" * 150,
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m A\u030angstr\u00f6m \ufb01ne \u00bd \u2460",
    "a\u0300\u0301\u0302\u0303",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "我能吞下玻璃而不伤身体。",
    "日本語のテキスト、カタカナと漢字。",
    "다람쥐 헌 쳇바퀴에 타고파",
    "ฉันกินกระจกได้",
    "मैं काँच खा सकता हूँ",
    "\u202bעברית\u202c \u202eالعربية\u202c",
    "😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
    "\u200b\u200c\u200d\ufeff\u00ad",
    "\u00a0\u2003\u3000\u2028\u2029",
    "\x00\x01\x07\x1b[0m\x7f",
    "a\x00b",
    "\ud7ff\ue000\ufffd\uffff\U0010ffff",
    "\u2581\u2581 a\u2581b",
    "\u0120hello\u010aworld",
    "<s>",
    "</s>",
    "before<s>between</s>after <pad><unk>",
    "<|endoftext|><|im_start|>user\n[INST] <<SYS>>",
    "<0x0A><0xFF>",
    "<s",
    "s>",
)
"""Texts on which tokenizers have been seen to differ, those that spell control tokens included."""

ALPHABETS = (
    (0x20, 0x7F),  # ASCII
    (0x00, 0x20),  # control characters, line breaks
    (0x80, 0x250),  # Latin with accents, no-break space, soft hyphen
    (0x300, 0x370),  # accents that combine with what is before them
    (0x370, 0x700),  # Greek, Cyrillic, Armenian, Hebrew, Arabic
    (0x900, 0x980),  # Devanagari
    (0x2000, 0x2070),  # blanks of all widths, joiners, direction marks
    (0x3000, 0x3100),  # Japanese
    (0x4E00, 0x9FFF),  # Chinese
    (0xAC00, 0xD7A4),  # Korean
    (0xE000, 0xE100),  # private use
    (0xFE00, 0xFE10),  # variation selectors
    (0xFF00, 0xFFF0),  # wide and narrow forms
    (0x1F300, 0x1F700),  # emoji
    (0x10000, 0x110000),  # everything beyond 16 bits
)
"""Ranges of code points that random texts are drawn from; none has a surrogate."""

NUM_RANDOM_TEXTS = 250
LONGEST_RANDOM_TEXT = 40


def _random_texts() -> tuple[str, ...]:
    """Texts that mix some alphabets."""
    choose = random.Random(SEED)

    def text() -> str:
        ranges = choose.sample(ALPHABETS, choose.randint(1, 3))
        length = choose.randint(1, LONGEST_RANDOM_TEXT)
        return "".join(chr(choose.randrange(*choose.choice(ranges))) for _ in range(length))

    return tuple(text() for _ in range(NUM_RANDOM_TEXTS))


TEXTS = (*KNOWN_TEXTS, *_random_texts())
"""What a tokenizer is asked."""
