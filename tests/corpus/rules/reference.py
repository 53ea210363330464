"""Every statistic and every rule once more, in slow and obvious Python over strings."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from megalite.corpus.rules.settings import C4Config, FineWebConfig, GopherQualityConfig


def statistics(text: str, quality: GopherQualityConfig | None = None, fineweb: FineWebConfig | None = None) -> dict:
    """All columns but C4's and the bad words, by name."""
    quality, fineweb = quality or GopherQualityConfig(), fineweb or FineWebConfig()
    chunks = text.split()
    words = [word for chunk in chunks if (word := strip_punctuation(chunk))]
    lines = text.split("\n")
    filled = [line for line in lines if line.strip()]
    paragraphs = split_paragraphs(lines)
    return {
        "code_points": len(text),
        "alphanumerics": sum(map(str.isalnum, text)),
        "digits": sum(map(str.isdecimal, text)),
        "chunks": len(chunks),
        "letter_chunks": sum(any(map(str.isalpha, chunk)) for chunk in chunks),
        "words": len(words),
        "word_chars": sum(map(len, words)),
        "stop_words": len(set(words) & set(quality.stop_words)),
        "hash_signs": text.count("#"),
        "ellipses": text.count("...") + text.count("…"),
        "lines": len(lines),
        "newlines": text.count("\n"),
        "line_chars": sum(map(len, lines)),
        "bullet_lines": sum(line.lstrip().startswith(("•", "-")) for line in lines),
        "ellipsis_lines": sum(line.rstrip().endswith(("...", "…")) for line in lines),
        "terminal_lines": sum(line.rstrip().endswith(tuple(fineweb.terminal_characters)) for line in lines),
        "short_lines": sum(len(line) <= fineweb.short_line_chars for line in filled),
        "filled_lines": len(filled),
        "repeated_lines": len(filled) - len({line.strip() for line in filled}),
        "duplicate_lines": len(filled) - len(set(filled)),
        "duplicate_line_chars": duplicate_chars(filled),
        "paragraphs": len(paragraphs),
        "duplicate_paragraphs": len(paragraphs) - len(set(paragraphs)),
        "duplicate_paragraph_chars": duplicate_chars(paragraphs),
        **ngram_statistics([strip_punctuation(chunk) or chunk for chunk in chunks]),
    }


def ngram_statistics(words: list[str]) -> dict:
    """Gopher's n-grams as the filters in use count them, each n-gram a tuple of words."""
    found = {f"top_{n}gram_chars": top_chars(words, n) for n in (2, 3, 4)}
    return found | {f"duplicate_{n}gram_chars": duplicate_gram_chars(words, n) for n in range(5, 11)}


def top_chars(words: list[str], n: int) -> int:
    grams = Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))
    if not grams:
        return 0
    gram, count = grams.most_common(1)[0]
    return len(" ".join(gram)) * count


def duplicate_gram_chars(words: list[str], n: int) -> int:
    read, at, chars = set(), 0, 0
    while at + n <= len(words):
        gram = tuple(words[at : at + n])
        if gram in read:
            chars += len("".join(gram))
            at += n
        else:
            read.add(gram)
            at += 1
    return chars


def is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def strip_punctuation(chunk: str) -> str:
    while chunk and is_punctuation(chunk[0]):
        chunk = chunk[1:]
    while chunk and is_punctuation(chunk[-1]):
        chunk = chunk[:-1]
    return chunk


def split_paragraphs(lines: list[str]) -> list[str]:
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
    return ["\n".join(paragraph) for paragraph in paragraphs if paragraph]


def duplicate_chars(texts: list[str]) -> int:
    return sum(map(len, texts)) - sum(map(len, set(texts)))


def c4(text: str, config: C4Config) -> tuple[str, dict]:
    """The text as C4 leaves it, and C4's columns."""
    kept, sentences, lorem_ipsum, curly_brackets = [], 0, 0, 0
    for line in text.split("\n"):
        line = line.strip()
        words = line.split()
        if config.max_word_length is not None and any(len(word) > config.max_word_length for word in words):
            continue
        if config.remove_citations:
            shorter = re.sub(r"\[\d*\]|\[edit\]|\[citation needed\]", "", line)
            line = shorter.rstrip() if shorter != line else line
        if config.terminal_punctuation and not ends_a_sentence(line, config):
            continue
        if config.min_words_per_line is not None and len(words) < config.min_words_per_line:
            continue
        lowered = ascii_lower(line)
        if config.reject_lorem_ipsum and "lorem ipsum" in lowered:
            lorem_ipsum += 1
        if config.drop_javascript_lines and "javascript" in lowered:
            continue
        curly_brackets += "{" in line
        if any(ascii_lower(phrase) in lowered for phrase in config.policy_phrases):
            continue
        kept.append(line)
        if line:
            ends = re.findall(r"[.!?](?=[\"')\]}»’”]*(?:[ \t]|$))|[。！？]", line)
            sentences += max(1, len(ends))
    while kept and not kept[0]:
        kept.pop(0)
    while kept and not kept[-1]:
        kept.pop()
    columns = {"sentences": sentences, "lorem_ipsum_lines": lorem_ipsum, "curly_bracket_lines": curly_brackets}
    return "\n".join(kept), columns


def ends_a_sentence(line: str, config: C4Config) -> bool:
    return line.endswith(tuple(config.terminal_characters)) and not line.endswith("...")


def ascii_lower(text: str) -> str:
    return "".join(character.lower() if character.isascii() else character for character in text)


def bad_words(text: str, phrases: list[str], *, whole_words: bool) -> int:
    """At how many places a phrase ends."""
    forms = {form for phrase in phrases for form in (phrase, phrase.lower(), phrase.upper())}
    forms |= {form for phrase in phrases for form in (phrase.capitalize(), phrase.title())}
    lowered, ends = ascii_lower(text), set()
    for form in map(ascii_lower, forms):
        for at in range(len(text)):
            if not lowered.startswith(form, at):
                continue
            end = at + len(form)
            touched = re.match(r"\w", text[end : end + 1]) or (at > 0 and re.match(r"\w", text[at - 1]))
            if not (whole_words and touched):
                ends.add(end)
    return len(ends)
