"""How often our quality rules and datatrove's filters decide alike on real text, and why not where they do not.

    make oracles
    PYTHONPATH=.venv/oracles .venv/bin/python tools/benchmarks/rules_agreement.py --documents 300

Documents of this machine, after the repair, each cut to CHARS characters; a family of rules is asked as a whole, with
datatrove's thresholds. A disagreement gets the name of the first class whose variant of datatrove's way decides as we
do: rows of one mark counted once, marks left out, our words in the place of spaCy's. `docs/benchmarks/rules.md` has the
tables.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import arguments
import numpy as np

from megalite.corpus.repair.repair import repair
from megalite.corpus.rules.apply import apply_rules, edit_and_measure, make_rules
from megalite.corpus.rules.datatrove import english, measure_as_datatrove
from megalite.corpus.rules.english import English
from megalite.corpus.rules.lexicon import Cut, Lexicon
from megalite.corpus.rules.settings import RulesConfig
from megalite.corpus.rules.statistics import measure, no_statistics
from megalite.texts import Texts

CHARS = 30_000

KEPT = ""

OWN_RULES_OFF = {
    "min_chars": None,
    "max_chars": None,
    "min_alphanumeric_share": None,
    "max_repeated_line_share": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gopher_quality": {},
    "gopher_repetition": {},
    "fineweb": {},
    "c4": {"min_words_per_line": 3, "min_sentences": 5},
}
"""With datatrove's thresholds, where they are others than ours by default."""

COMPAT = {"compat": "datatrove"}

ROWS, MARKS, INSIDE = (
    "marks are words: each of a row of them (=====)",
    "marks are words: commas, brackets, operators",
    "words are cut at marks inside of them",
)
QUOTES = "a quote ends a line here, as in the paper; full stops of all scripts do there"
SENTENCES = "sentences: counted by their marks here, by spaCy's words there"
CITATIONS = "a blank before a citation that was cut hides the full stop there"
UNNAMED = "not explained"

Cutter = Callable[[English], Cut]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=arguments.count, default=300, help="of each kind at most")
    options = parser.parse_args()
    texts, kinds = [], []
    for kind, found in real_documents(options.documents):
        texts += found
        kinds += [kind] * len(found)
    texts = list(repair(Texts.of(texts)))
    print(f"datatrove {version('datatrove')}, spaCy {version('spacy')}, Python {sysconfig.get_python_version()}")
    print(f"{len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} million characters\n")
    print(tables(compare(texts), kinds))
    print("\nMB/s of CPU time, all four families: " + ", ".join(f"{name} {rate:.2f}" for name, rate in rates(texts)))


def real_documents(most: int) -> Iterator[tuple[str, list[str]]]:
    """Texts of each kind, the same on the same machine image."""
    import pydoc_data.topics

    from corpus_text import is_text_file, read_text

    share, purelib = Path("/usr/share"), Path(sysconfig.get_path("purelib"))
    yield "Python's reference", list(pydoc_data.topics.topics.values())[:most]
    places = (
        ("Python's library", Path(sysconfig.get_path("stdlib")).glob("*.py")),
        ("manual pages", (share / "man").glob("man[1-8]/*.gz")),
        ("licences", (share / "doc").glob("*/copyright")),
        ("documentation", (each for each in (share / "doc").rglob("*") if each.name != "copyright")),
        ("descriptions of packages", purelib.glob("*.dist-info/METADATA")),
    )
    for kind, found in places:
        paths = sorted(path for path in found if path.is_file() and (path.suffix == "" or is_text_file(str(path))))
        random.Random(0).shuffle(paths)
        texts: dict[str, None] = {}
        for path in paths:
            if len(texts) < most and (text := read_text(str(path))):
                texts[text[:CHARS]] = None
        yield kind, list(texts)


class Verdict(NamedTuple):
    """What became of a document: reasons to reject it, KEPT for none."""

    theirs: str
    ours: str
    compat: str
    """Ours with `compat: datatrove`."""
    why: str
    """Class of a disagreement between the first two."""


def compare(texts: Sequence[str]) -> dict[str, list[Verdict]]:
    """By family, the verdicts on each document."""
    theirs = ask_datatrove(texts)
    found = {}
    for family, thresholds in FAMILIES.items():
        ours = reasons(texts, family, thresholds)
        compat = reasons(texts, family, COMPAT)
        classes = [KEPT] * len(texts)
        differ = [place for place in range(len(texts)) if bool(ours[place]) != bool(theirs[family][place])]
        if differ:
            named = name_classes([texts[place] for place in differ], family, [ours[place] for place in differ])
            for place, name in zip(differ, named, strict=True):
                classes[place] = name
        found[family] = list(map(Verdict, theirs[family], ours, compat, classes))
    return found


def rates(texts: Sequence[str]) -> Iterator[tuple[str, float]]:
    """MB a second of each way, code compiled; spaCy's words with an empty lexicon, and with one that knows them all."""
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    ours = RulesConfig(**{family: {} for family in FAMILIES})
    compat = RulesConfig(**dict.fromkeys(FAMILIES, COMPAT))
    given = Texts.of(texts)
    english().learn(given)
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("datatrove", lambda: ask_datatrove(texts)),
        ("ours", lambda: apply_rules(given, ours)),
        ("compat, words known", lambda: apply_rules(given, compat)),
        ("compat, words new", lambda: (english.cache_clear(), english(), apply_rules(given, compat))),
    ]
    for name, step in steps:
        if name.startswith(("ours", "compat, words known")):
            step()
        start = time.process_time()
        step()
        yield name, megabytes / (time.process_time() - start)


def ask_datatrove(texts: Sequence[str]) -> dict[str, list[str]]:
    """By family, its reason to reject each text, KEPT for none."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    asked = {
        "gopher_quality": filters.GopherQualityFilter(),
        "gopher_repetition": filters.GopherRepetitionFilter(),
        "fineweb": filters.FineWebQualityFilter(),
        "c4": filters.C4QualityFilter(),
    }
    found = defaultdict(list)
    for text in texts:
        for family, each in asked.items():
            outcome = each.filter(Document(text=text, id=""))
            found[family].append(KEPT if outcome is True else str(outcome[1]))
    return found


def reasons(texts: Sequence[str], family: str, settings: dict[str, Any]) -> list[str]:
    """Our reason to reject each text, KEPT for none."""
    config = RulesConfig(**OWN_RULES_OFF, **{family: settings})
    _, statistics = edit_and_measure(Texts.of(texts), config)
    return _first_reasons(config, statistics)


def _first_reasons(config: RulesConfig, statistics: np.ndarray) -> list[str]:
    found = np.full(len(statistics), KEPT, object)
    for rule in reversed(make_rules(config)):
        found[rule.rejects(statistics)] = rule.reason
    return found.tolist()


def name_classes(texts: Sequence[str], family: str, ours: Sequence[str]) -> list[str]:
    """Why datatrove decides otherwise, of each text."""
    if family == "c4":
        edited = [edit_and_measure(Texts.of(texts), RulesConfig(c4=each))[0] for each in (FAMILIES["c4"], COMPAT)]
        return [SENTENCES if one == other else CITATIONS for one, other in zip(*edited, strict=True)]
    variants = [(ROWS, _rows_once, {}), (MARKS, _no_marks, {}), (INSIDE, _our_words, {})]
    if family == "fineweb":
        variants = [(QUOTES, _as_spacy, {"terminal_characters": ".?!\"'"}), *variants]
    decided = [(name, _as_varied(texts, family, cutter, settings)) for name, cutter, settings in variants]
    return [
        next((name for name, other in decided if bool(other[place]) == bool(ours[place])), UNNAMED)
        for place in range(len(texts))
    ]


def _as_varied(texts: Sequence[str], family: str, cutter: Cutter, settings: dict[str, Any]) -> list[str]:
    """What datatrove's way would decide with other words."""
    config = RulesConfig(**OWN_RULES_OFF, **{family: {**COMPAT, **settings}})
    statistics, given = no_statistics(len(texts)), Texts.of(texts)
    measure(given, statistics, quality=config.gopher_quality, fineweb=config.fineweb)
    language = _english()
    lexicon = Lexicon(cutter(language), list(language.cases), language.end_marks)
    measure_as_datatrove(given, statistics, config, lexicon)
    return _first_reasons(config, statistics)


@lru_cache(maxsize=1)
def _english() -> English:
    return English()


def _is_mark(word: str) -> bool:
    return not any(map(str.isalnum, word))


def _as_spacy(language: English) -> Cut:
    return language.cut


def _rows_once(language: English) -> Cut:
    def cut(chunk: str) -> list[str]:
        rows = ((word, len(list(same))) for word, same in groupby(language.cut(chunk)))
        return [word for word, count in rows for _ in range(1 if _is_mark(word) else count)]

    return cut


def _no_marks(language: English) -> Cut:
    return lambda chunk: [word for word in language.cut(chunk) if not _is_mark(word)]


def _our_words(_: English) -> Cut:
    def strip(chunk: str) -> str:
        is_punctuation = [unicodedata.category(each)[0] in "PS" for each in chunk]
        if all(is_punctuation):
            return chunk
        first, last = is_punctuation.index(False), is_punctuation[::-1].index(False)
        return chunk[first : len(chunk) - last]

    return lambda chunk: [strip(chunk)]


def tables(found: dict[str, list[Verdict]], kinds: Sequence[str]) -> str:
    """The figures as Markdown."""
    lines = ["| documents | number |" + "".join(f" {family} | with compat |" for family in found)]
    lines.append("|---|---|" + "---|---|" * len(found))
    for name in (*dict.fromkeys(kinds), "all"):
        places = [place for place, kind in enumerate(kinds) if name in (kind, "all")]
        cells = []
        for verdicts in found.values():
            chosen = [verdicts[place] for place in places]
            cells += [
                f"{sum(bool(each.ours) == bool(each.theirs) for each in chosen) / len(chosen):.1%}",
                f"{sum(bool(each.compat) == bool(each.theirs) for each in chosen) / len(chosen):.1%}",
            ]
        lines.append(f"| {name} | {len(places):,} | " + " | ".join(cells) + " |")
    lines += ["", "| family | why they differ | documents | only datatrove rejects | only we reject |"]
    lines.append("|---|---|---|---|---|")
    for family, verdicts in found.items():
        for why, count in Counter(each.why for each in verdicts if each.why).most_common():
            only_theirs = sum(each.why == why and bool(each.theirs) for each in verdicts)
            lines.append(f"| {family} | {why} | {count} | {only_theirs} | {count - only_theirs} |")
    lines += ["", "| family | datatrove's reason where only it rejects | documents |", "|---|---|---|"]
    for family, verdicts in found.items():
        reasons = Counter(each.theirs for each in verdicts if each.theirs and not each.ours)
        lines += [f"| {family} | {reason} | {count} |" for reason, count in reasons.most_common()]
    pairs = [(bool(each.compat), bool(each.theirs)) for verdicts in found.values() for each in verdicts]
    wrong = sum(one != other for one, other in pairs)
    lines += ["", f"with compat {wrong} of {len(pairs):,} decisions differ"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
