"""Our rules, each alone, on texts: with thresholds like those that datatrove's filters are given."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.corpus.rules.apply import edit_and_measure, make_rules
from megalite.corpus.rules.settings import (
    C4Config,
    FineWebConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RulesConfig,
)
from megalite.texts import Texts

PLAIN = (
    RulesConfig(
        gopher_quality=GopherQualityConfig(), gopher_repetition=GopherRepetitionConfig(), fineweb=FineWebConfig()
    ),
    RulesConfig(c4=C4Config()),
)
"""C4's apart from the others, which would else judge what C4's leave."""

TERMINAL = ".?!\"'"

COMPAT = (
    RulesConfig(
        gopher_quality=GopherQualityConfig(compat="datatrove"),
        gopher_repetition=GopherRepetitionConfig(compat="datatrove"),
        fineweb=FineWebConfig(compat="datatrove", terminal_characters=TERMINAL),
    ),
    RulesConfig(c4=C4Config(compat="datatrove", min_words_per_line=5, min_sentences=3)),
)

OWN_RULES = {"empty", "too short", "too long", "few letters and digits", "many digits", "repeated lines"}
"""datatrove has none of these."""

EDIT = "c4: edit"
"""In the place of a rule: what C4 leaves of the text."""


def our_decisions(texts: Sequence[str], configs: Sequence[RulesConfig]) -> dict[str, list]:
    """By rule, whether it rejects each text; the last config is C4's."""
    found: dict[str, list] = {}
    edited: Texts | None = None
    for config in configs:
        edited, statistics = edit_and_measure(Texts.of(texts), config)
        rules = [rule for rule in make_rules(config) if rule.reason not in OWN_RULES]
        found |= {rule.reason: rule.rejects(statistics).tolist() for rule in rules}
    assert edited is not None
    return {**found, EDIT: list(edited)}
