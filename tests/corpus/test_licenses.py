"""Licences: what headers, sentences and metadata say, what an expression permits, and what the station puts aside."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import make_documents
from megalite.corpus.effects import headline, measure_effects
from megalite.corpus.inspection import Wanted, inspect
from megalite.corpus.licenses import UNKNOWN, find_licenses, is_accepted
from megalite.corpus.recipe import CleanConfig
from megalite.corpus.source import DocumentSource
from megalite.corpus.stations.clean import clean
from megalite.errors import DataError
from megalite.texts import Texts

MIT = """/*
 * Copyright (c) 2020 Somebody
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy
 * of this software and associated documentation files (the "Software"), to deal
 */
"""

GPL = """# This program is free software: you can redistribute it and/or modify it under the terms of the GNU
# General Public License as published by the Free Software Foundation, either version 3 of the License, or
# (at your option) any later version.
"""

LGPL = "(* GNU Lesser General\n * Public License version 2.1 *)\n"

APACHE = '// Licensed under the Apache License, Version 2.0 (the "License");\n'

BSD = "-- Redistribution and use in source and binary forms, with or without\n-- modification, are permitted\n"

ISC = (
    "Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby "
    "granted"
)

TEXTS = {
    MIT: "MIT",
    GPL: "GPL-3.0-or-later",
    LGPL: "LGPL-2.1-only",
    APACHE: "Apache-2.0",
    BSD: "BSD-2-Clause",
    BSD + "-- Neither the name of the holder": "BSD-3-Clause",
    f"{ISC}, provided that the above copyright notice and": "ISC",
    f"{ISC}.": "0BSD",
    "// SPDX-License-Identifier: MIT OR Apache-2.0\n" + GPL: "MIT OR Apache-2.0",
    "/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */": "GPL-2.0-only WITH Linux-syscall-note",
    "<!-- SPDX-License-Identifier: MIT -->": "MIT",
    MIT + APACHE: "MIT AND Apache-2.0",
    "# BSD 3-Clause License; see LICENSE": "BSD-3-Clause",
    "// Released under the MIT license.": "MIT",
    "def permit(licensed): return licensed": UNKNOWN,
    "x = 1\n" * 2000 + MIT: UNKNOWN,
    "": UNKNOWN,
}


def found(
    texts: list[str], metadata: list[dict] | None = None, field: str | None = "license"
) -> list[tuple[str, bool]]:
    described = make_documents(
        [""] * len(texts), "", Texts.of(texts).to_arrow(), [json.dumps(each) for each in metadata or []] or None
    )
    result = find_licenses(Texts.of(texts), described.column("metadata"), field, ["mit", "Apache-2.0"])
    return list(zip(result.names, result.accepted.tolist(), strict=True))


def test_texts():
    """Known sentences in comments of several languages, and SPDX headers, which come first."""
    assert [name for name, _ in found(list(TEXTS))] == list(TEXTS.values())
    accepted = {name for name, fits in found(list(TEXTS)) if fits}
    assert accepted == {"MIT", "Apache-2.0", "MIT OR Apache-2.0", "MIT AND Apache-2.0"}


def test_metadata():
    """A name, a list of which all must be accepted, and nothing; the text's own word comes first."""
    cases = [
        ("x", {"license": "MIT"}, ("MIT", True)),
        ("x", {"license": ["mit", "Apache-2.0"]}, ("mit AND Apache-2.0", True)),
        ("x", {"license": ["MIT", "GPL-3.0-only"]}, ("MIT AND GPL-3.0-only", False)),
        ("x", {"license": []}, (UNKNOWN, False)),
        ("x", {"license": 7}, (UNKNOWN, False)),
        ("x", {"other": "MIT"}, (UNKNOWN, False)),
        (GPL, {"license": "MIT"}, ("GPL-3.0-or-later", False)),
        (MIT, {"license": "GPL-3.0-only"}, ("MIT", True)),
    ]
    texts, metadata, expected = zip(*cases, strict=True)
    assert found(list(texts), list(metadata)) == list(expected)
    assert found(["x"], [{"license": "MIT"}], field=None) == [(UNKNOWN, False)]


NAMES = ("a", "b", "c")

EXPRESSIONS = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(EXPRESSIONS)
def test_expressions_are_those_of_logic(expression):
    """AND, OR and brackets against Python's own, over all choices of accepted licences."""
    for choice in itertools.product([False, True], repeat=len(NAMES)):
        accepted = {name for name, chosen in zip(NAMES, choice, strict=True) if chosen}
        truth = eval(expression, dict(zip(NAMES, choice, strict=True)))
        assert is_accepted(expression.upper(), accepted) == truth


@pytest.mark.parametrize("expression", ["", "a b", "(a", "a)", "a and", "or a", "a with", "and", "(" * 5000 + "a"])
def test_what_is_no_expression_is_not_accepted(expression):
    """And takes no stack."""
    assert not is_accepted(expression, {"a"})


def test_exceptions_add_permissions():
    """So the licence alone is enough; or the pair, where only it is accepted."""
    assert is_accepted("Apache-2.0 WITH LLVM-exception", {"apache-2.0"})
    assert is_accepted("GPL-2.0-only WITH X OR z", {"gpl-2.0-only with x"})
    assert not is_accepted("GPL-2.0-only", {"gpl-2.0-only with x"})


def test_the_station_puts_other_licences_aside(tmp_path):
    """With the licence as the reason, counted; `effects` and `inspect` say the same; a field nobody has is refused."""
    records = [(MIT, None), (GPL, "MIT"), ("no word of it", None), ("a program", "MIT"), ("a program", "GPL-2.0-only")]
    lines = [{"text": f"{text}\n{'code ' * 9} {row}", "terms": terms} for row, (text, terms) in enumerate(records)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if v}) + "\n" for line in lines))
    corpus = Corpus([DocumentSource(path=path, keep_fields=("terms",))])
    config = CleanConfig(license={"field": "terms"})
    counts = clean(corpus, tmp_path / "out", config).manifest.counts
    reasons = {"license: GPL-2.0-only": 1, "license: GPL-3.0-or-later": 1, "license: unknown": 1}
    assert (counts["documents"], counts["rejected"]) == (2, reasons)
    assert counts["licenses"] == {"GPL-2.0-only": 1, "GPL-3.0-or-later": 1, "MIT": 2, "unknown": 1}
    effects = measure_effects(corpus, config)
    assert (effects.documents, effects.other_licenses) == (2, 3)
    assert "3 documents under other licences" in headline(effects)
    [shown] = inspect(tmp_path / "out", Wanted())
    assert {group.reason for group in shown.groups} == {"kept", *reasons}

    kept = clean(corpus, tmp_path / "kept", CleanConfig(license={"field": "terms", "unknown": "keep"})).manifest.counts
    assert (kept["documents"], kept["licenses"]["unknown"]) == (3, 1)
    with pytest.raises(DataError, match=r"license\.field: no document has a field 'license'.* name it in keep_fields"):
        clean(corpus, tmp_path / "none", CleanConfig(license={"field": "license"}))
