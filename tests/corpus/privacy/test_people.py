"""Names, addresses, social security and telephone numbers: what is found of a labelled set, and what in vain."""

from __future__ import annotations

from collections import Counter

from megalite.corpus.privacy.redact import find_redactions
from megalite.corpus.privacy.settings import PrivacyConfig
from megalite.texts import Texts
from tests.corpus.privacy.labelled import Label, labelled_lines

CONFIG = PrivacyConfig(us_ssn="<SSN>", address="<ADDRESS>", name="<NAME>")

FLOORS = {"name": (0.70, 0.95), "address": (0.95, 0.95), "us_ssn": (1.0, 1.0), "phone": (1.0, 1.0)}
"""Least recall and precision by kind."""


def test_recall_and_precision():
    """A label counts as found if all of it is replaced as its kind; what is replaced counts as right if it holds
    nothing but a label of its kind. A telephone number is never taken for a social security number, nor the other way
    round."""
    lines = labelled_lines()
    found: list[set[Label]] = [set() for _ in lines]
    texts = Texts.of([line.text for line in lines])
    for item in find_redactions(texts, CONFIG):
        start = int(texts.offsets[item.document])
        found[item.document].add(Label(item.rule.kind, item.start - start, item.end - start))
    labels, hits, taken, right = Counter(), Counter(), Counter(), Counter()
    confused = []
    for line, of_line in zip(lines, found, strict=True):
        for label in line.labels:
            labels[label.kind] += 1
            hits[label.kind] += any(covers(each, label) for each in of_line)
        for each in of_line:
            taken[each.kind] += 1
            right[each.kind] += any(covers(label, each) for label in line.labels)
            confused += [line.text for label in line.labels if is_confused(each, label)]
    assert confused == []
    assert sum(labels.values()) >= 400
    scores = {kind: (hits[kind] / labels[kind], right[kind] / max(taken[kind], 1)) for kind in FLOORS}
    for kind, (least_recall, least_precision) in FLOORS.items():
        recall, precision = scores[kind]
        assert recall >= least_recall, (kind, scores)
        assert precision >= least_precision, (kind, scores)


def is_confused(one: Label, other: Label) -> bool:
    """Whether two that overlap are a telephone and a social security number."""
    return {one.kind, other.kind} == {"us_ssn", "phone"} and one.start < other.end and other.start < one.end


def covers(outer: Label, inner: Label) -> bool:
    """Whether one of the same kind lies within the other."""
    return outer.kind == inner.kind and outer.start <= inner.start and inner.end <= outer.end
