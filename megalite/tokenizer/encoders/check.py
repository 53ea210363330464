"""Texts on which encoders have been seen to differ, and the comparison of an encoder with its reference.

It is no proof: the tests hold the compiled encoders against the libraries on thousands of texts. It finds what no test
of ours can: another version of a library on this machine, and a vocabulary that we have not thought of.
"""

from __future__ import annotations

import numpy as np

from megalite.texts import Texts
from megalite.tokenizer.encoders.reference import Encoder, Reference

CONTROL_SPELLINGS = (
    "<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "<0xE2>", "<|endoftext|>", "<|im_start|>system", "[INST] [/INST]",
    "x<s>y</s>", "</s></s>", "<s", "s>", "< s >", "<<s>>", "<mask>", "[CLS] [SEP] [PAD]",
)  # fmt: skip

TRICKY_TEXTS = (
    *CONTROL_SPELLINGS,
    "",
    " ",
    "   two  and   three    blanks   ",
    "\n\n\n\t\t a\t\r\n b \n\n  c\n",
    " \n \n\n\x0b\x0c\x1c\x1d\x85\xa0x\u2003 y\u3000\u2028z\u202f ",
    "a" * 500 + "abab" * 100 + "aba",
    " " * 1000 + "\n" * 1000 + "=" * 777 + "-" * 77 + "\n",
    "1234567890 3.14159 0x1F 1e-5 a1b2c3 1,000,000.00  42 \u0663\u0664 \u00bd\u2460\u2167 \u4e00\u4e8c x\u00b2",
    "It's we'll they've I'm he'd 'tis 's 't 're 've 'm 'll 'd IT'S ''s '' ' 'l 'v x'ss x'rex \u2019s",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "é e\u0301 ﬁ Å A\u030a ½ ① " + "a\u0300\u0301\u0302" * 50,
    "日本語のテキスト。 中文 한국어 ไทย हिन्दी \u0e33\u1ec7",
    "العربية \u202e עברית \u200f\u200e Съешь же ещё этих мягких французских булок",
    "😀👨‍👩‍👧‍👦🏳️‍🌈👍🏽 🇩🇪 \U0001f9ff\U0002a6d6\U000e0061\U000f0000\U0010ffff",
    "\x00\x01\x7f\u00ad\u200b\u200c\u200d\u2060\ufeff\ufffd\ud7ff\ue000\uffff",
    "\u2581 \u2581\u2581 a\u2581b \u2581the the\u2581 _ __ \u0120the \u010a",
    "def f(x):\n        return x  # comment\n\n\n    @property\n\tif a!=b&&c[0]->d::e {}();//\n",
    "http://www.example.org/a/b?c=d&e=%20f#g user@example.org C:\\path\\to \\n \\u2581 $x^{2}_{i}$ <b>bold</b>",
    "Donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichen" * 3 + "pneumonoultramicroscopicsilicovolcanoconiosis",
)
"""Also control characters, unassigned and private ones, forms that normalise, and every ending behind an apostrophe."""


def first_difference(encoder: Encoder, reference: Reference, dtype: np.dtype) -> str | None:
    """Encode the tricky texts by both, and texts that spell the tokenizer's own control tokens.

    Each is encoded twice, so that what an encoder remembers is compared as well.

    Returns:
        The first text with other ids, shortened; None when all are equal.
    """
    spellings = [f"{token} a{token}b\n{token}{token}" for token in reference.added_spellings()]
    together = Texts.of([*TRICKY_TEXTS, *spellings, "\n".join(TRICKY_TEXTS)])
    expected, expected_lengths = reference.encode_texts(together, dtype, None)
    for _ in range(2):
        tokens, lengths = encoder.encode_texts(together, dtype, None)
        if np.array_equal(lengths, expected_lengths) and np.array_equal(tokens, expected):
            continue
        ends, expected_ends = np.cumsum(lengths)[:-1], np.cumsum(expected_lengths)[:-1]
        pairs = zip(np.split(tokens, ends), np.split(expected, expected_ends), strict=True)
        different = next(text for text, pair in enumerate(pairs) if not np.array_equal(*pair))
        return repr(together[different][:40])
    return None
