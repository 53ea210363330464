"""Redaction: personal data and secrets replaced, each kind counted.

    bytes --scan--> candidates --exact checks--> spans --of two that overlap, the surer one--> patches --> texts

The scan is compiled and sees every byte; the checks are Python and see some tens of places in a megabyte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from megalite.corpus.privacy import addresses, credentials, network, payment, people, telephone
from megalite.corpus.privacy.settings import PrivacyConfig
from megalite.corpus.privacy.window import (
    ADDRESS,
    ASSIGNMENT,
    AT,
    CARD,
    COLONS,
    DOTTED,
    IBAN,
    JWT,
    KEY,
    NAME,
    PEM,
    PHONE,
    PLUS,
    SSN,
    Span,
    Window,
)
from megalite.texts import Patch, Texts, splice

Check = Callable[[Window], Span | None]


class RedactionRule(NamedTuple):
    """What to do at the candidates of one code."""

    rank: int
    code: int
    kind: str
    check: Check
    replacement: bytes


class Redaction(NamedTuple):
    """Something to replace. In order of place, and of two at one place the surer kind first."""

    start: int
    rank: int
    end: int
    document: int
    rule: RedactionRule


def redact(texts: Texts, config: PrivacyConfig, is_redacted: np.ndarray | None = None) -> tuple[Texts, dict[str, int]]:
    """Replace what the settings name.

    Args:
        texts: not changed; returned as they are when nothing is found.
        config: what to replace by what.
        is_redacted: bool [texts], those to leave as they are; None where none is.

    Returns:
        The texts, and how many of each kind were replaced; kinds that were not found are left out.
    """
    chosen = find_redactions(texts, config)
    if is_redacted is not None:
        chosen = [item for item in chosen if not is_redacted[item.document]]
    counts = Counter(item.rule.kind for item in chosen)
    patches = [Patch(item.document, item.start, item.end, item.rule.replacement) for item in chosen]
    return splice(texts, patches), dict(sorted(counts.items()))


def find_redactions(texts: Texts, config: PrivacyConfig) -> list[Redaction]:
    """What is to be replaced, in order of place, none over another."""
    from megalite.corpus.privacy.candidates import find_candidates

    rules: dict[int, list[RedactionRule]] = {}
    for rule in make_rules(config):
        rules.setdefault(rule.code, []).append(rule)
    wanted = sum(1 << code for code in rules)
    memory = np.ascontiguousarray(texts.buffer).data
    offsets = texts.offsets.tolist()
    candidates = find_candidates(texts.buffer, texts.offsets, wanted)
    found = []
    for code, place, document in zip(*(column.tolist() for column in candidates), strict=True):
        window = Window(memory, place, offsets[document], offsets[document + 1])
        for rule in rules[code]:
            if (span := rule.check(window)) is not None:
                found.append(Redaction(span[0], rule.rank, span[1], document, rule))
    return _without_overlaps(found)


def make_rules(config: PrivacyConfig) -> list[RedactionRule]:
    """The rules that are on, the surest kind first."""
    private = config.private_ip_addresses
    table: list[tuple[int, str, Check]] = [
        (PEM, "private_key", credentials.find_private_key),
        (JWT, "jwt", credentials.find_jwt),
        (KEY, "api_key", credentials.find_key),
        (ASSIGNMENT, "api_key", credentials.find_assigned_aws_secret),
        (AT, "email", network.find_email),
        (IBAN, "iban", payment.find_iban),
        (CARD, "card", payment.find_card),
        (DOTTED, "ip_address", partial(network.find_ipv4, private=private)),
        (COLONS, "ip_address", partial(network.find_ipv6, private=private)),
        (SSN, "us_ssn", telephone.find_ssn),
        (PLUS, "phone", telephone.find_international),
        (PHONE, "phone", telephone.find_national),
        (ADDRESS, "address", addresses.find_address),
        (NAME, "name", people.find_name),
        (ASSIGNMENT, "password", credentials.find_assigned_password),
    ]
    rules: list[RedactionRule] = []
    for code, kind, check in table:
        replacement = getattr(config, kind)
        if replacement is not None:
            rules.append(RedactionRule(len(rules), code, kind, check, replacement.encode()))
    return rules


def _without_overlaps(found: list[Redaction]) -> list[Redaction]:
    """Of those that overlap, the one that begins first; of those that begin together, the surer one."""
    chosen: list[Redaction] = []
    for item in sorted(found, key=attrgetter("start", "rank")):
        if not chosen or item.start >= chosen[-1].end:
            chosen.append(item)
    return chosen
