"""Boilerplate lines: those that a count by hand finds, in files as in memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.spans.lines import count_lines, count_lines_in_shards, find_lines, frequent_lines
from megalite.corpus.spans.settings import LineDedupConfig
from megalite.progress import NoProgress
from megalite.texts import Texts
from tests.corpus.spans.kit import ON_THE_SPOT, as_tuples, remove_spans, write_shards
from tests.kit.data import prose

lines = st.sampled_from(
    ["Share this page", " share THIS page\t", "page 3 of 7", "page 4 of 8", "page 12 of 7", "}", "", "Über uns", "x"]
)
documents = st.lists(lines, max_size=6).map("\n".join)


def normalised(line: str, config: LineDedupConfig) -> bytes | None:
    """A line's form by hand; None when it is too short."""
    form = line.encode().strip(b" \t\r\v\f\n").lower()
    if len(form) < config.min_chars:
        return None
    return form.translate(bytes.maketrans(b"123456789", b"000000000")) if config.fold_digits else form


def remove_by_hand(texts: list[str], config: LineDedupConfig) -> list[str]:
    """Count the forms of each document's lines once, then drop the lines with a frequent form."""
    counts = Counter(form for text in texts for form in {normalised(line, config) for line in text.split("\n")})
    return [
        "".join(
            line
            for line in text.splitlines(keepends=True)
            if (form := normalised(line, config)) is None or counts[form] < config.min_occurrences
        )
        for text in texts
    ]


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(documents, max_size=8),
    min_occurrences=st.integers(2, 4),
    min_chars=st.sampled_from([1, 10]),
    fold_digits=st.booleans(),
)
def test_equals_count_by_hand(texts, min_occurrences, min_chars, fold_digits):
    """Blanks around, case and digits are forgotten as asked; a line counts once a document; all occurrences go."""
    config = LineDedupConfig(min_occurrences=min_occurrences, min_chars=min_chars, fold_digits=fold_digits)
    counts = count_lines(Texts.of(texts), config)
    frequent = counts["key"][counts["documents"] >= min_occurrences]
    spans = find_lines(Texts.of(texts), frequent, config)
    assert [rest.decode() for rest in remove_spans(texts, spans)] == remove_by_hand(texts, config)


@pytest.mark.parametrize("scope", ["corpus", "shard"])
@pytest.mark.parametrize(("num_shards", "num_partitions"), [(1, 1), (3, 5)])
def test_shards_equal_memory(tmp_path, scope, num_shards, num_partitions):
    """Counting by shard and partition equals counting by hand: over the corpus, or over each shard by itself."""
    texts = [f"Home | About | Contact\n{text}\n© the same footer everywhere" for text in prose(30)]
    texts[20] = texts[20].split("\n", 1)[1]
    config = LineDedupConfig(min_occurrences=10, scope=scope, num_partitions=num_partitions)
    shards = write_shards(tmp_path / "in", texts, num_shards=num_shards, rows=4)
    count_lines_in_shards(tmp_path / "out", shards, config, runner=ON_THE_SPOT, progress=NoProgress())
    for number, part in enumerate(np.array_split(np.array(texts, object), num_shards)):
        frequent = frequent_lines(tmp_path / "out", number, config)
        left = remove_spans(part, find_lines(Texts.of(part), frequent, config))
        assert len(frequent) == (2 if scope == "corpus" or number < 2 else 1)
        if scope == "shard":
            assert [rest.decode() for rest in left] == remove_by_hand(list(part), config)
        else:
            assert not any(b"Home" in rest or b"footer" in rest for rest in left)


def test_spans_take_the_line_feed():
    """A removed line leaves no empty one behind; touching lines are one span."""
    texts = Texts.of(["a line to go\na line to go too\nstays\na line to go"])
    config = LineDedupConfig(min_chars=1)
    counts = count_lines(Texts.of(["a line to go", "a line to go too"]), config)
    assert as_tuples(find_lines(texts, counts["key"], config)) == [(0, 0, 30), (0, 36, 48)]
