"""Conversations with thoughts and tools: all that a template is given is redacted, and counts for duplicates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

import megalite.corpus.corpus
from megalite.corpus.conversations import MalformedRecordError, from_metadata, parse_conversation, text_of
from megalite.corpus.corpus import Corpus
from megalite.corpus.json_texts import spelt_out, visit_texts
from megalite.corpus.recipe import CleanConfig, DedupConfig, DocumentSource
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.dedup import dedup
from megalite.stations.station import StationResult
from tests.kit.data import corpus_of

Q = {"role": "user", "content": "tell Alice"}
CARD = 4111111111111111
AWS = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


def call(arguments: object, **more: object) -> dict:
    """A message that calls a tool."""
    function = {"name": "send", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}], **more}


def cleaned(folder: Path, *records: dict, **settings: object) -> tuple[list[dict], dict]:
    """Rows of what `clean` keeps, and its counts."""
    path = folder / "talk.jsonl"
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in records))
    config = CleanConfig(min_chars=None, max_repeated_line_share=None, **settings)
    result = clean(Corpus([DocumentSource(path=path, conversations="messages")]), folder / "clean", config)
    return pq.read_table(folder / "clean" / "part-00000.parquet").to_pylist(), result.manifest.counts


@pytest.mark.parametrize("as_text", [False, True])
def test_redaction_reaches_all_that_a_template_is_given(tmp_path, as_text):
    """Thoughts, names, tools and calls, whose arguments stay JSON and keep their blanks; counted once each."""
    arguments = {
        "to": "alice0@corp.com",
        "body": "  def f():\n    return 'bob@corp.com'\n",
        "alice1@corp.com": [CARD, 7],
        "aws_secret_access_key": AWS,
    }
    record = {
        "messages": [
            {**Q, "name": "alice2@corp.com"},
            call(json.dumps(arguments) if as_text else arguments, reasoning_content="alice3@corp.com\r\nwill do"),
        ],
        "tools": [{"function": {"name": "send", "description": "as alice4@corp.com does"}}],
    }
    (row,), counts = cleaned(tmp_path, record, privacy={})
    found = from_metadata(row["metadata"])
    asked, answered = found["messages"]
    given = answered["tool_calls"][0]["function"]["arguments"]
    assert (json.loads(given) if as_text else given) == {
        "to": "<EMAIL>",
        "body": "  def f():\n    return '<EMAIL>'\n",
        "<EMAIL>": ["<CARD>", 7],
        "aws_secret_access_key": "<API_KEY>",
    }
    assert (asked["name"], answered["reasoning_content"]) == ("<EMAIL>", "<EMAIL>\nwill do")
    assert found["tools"][0]["function"]["description"] == "as <EMAIL> does"
    assert counts["redacted"] == {"api_key": 1, "card": 1, "email": 6}
    assert "corp.com" not in row["metadata"] + row["text"]
    assert row["text"] == text_of(found)


def test_without_redaction_calls_stay_as_they_are(tmp_path):
    """To the byte; and a message that calls a tool need not say a word."""
    arguments = ' {"to":  "alice0@corp.com", "text": " x \\r\\n"} '
    (row,), counts = cleaned(tmp_path, {"messages": [Q, call(arguments, content=" \n")]})
    (_, answered) = from_metadata(row["metadata"])["messages"]
    assert answered["tool_calls"][0]["function"]["arguments"] == arguments
    assert counts["redacted"] == {}


def test_what_differs_in_calls_and_thoughts_is_no_duplicate(tmp_path):
    """Calls beside the same words, thoughts before them; the last is one."""
    answers = [
        call('{"a": 1}', content="I call a tool"),
        call('{"a": 2}', content="I call a tool"),
        {"role": "assistant", "content": "I call a tool", "reasoning_content": "it seems best"},
        {"role": "assistant", "content": "I call a tool"},
        {"role": "assistant", "content": "I call a tool"},
    ]
    rows, _ = cleaned(tmp_path, *({"messages": [Q, each]} for each in answers))
    assert rows[2]["text"] == "user: tell Alice\n\nassistant: it seems best\nI call a tool"
    dedup(corpus_of(tmp_path / "clean"), tmp_path / "dedup", DedupConfig())
    assert pq.read_table(tmp_path / "dedup" / "part-00000.parquet").num_rows == 4


def test_words_of_calls_stand_in_the_text_as_people_write_them():
    """Without escapes, so that an evaluation text is found in them."""
    calls = [{"function": {"name": "write", "arguments": json.dumps({"text": "größer als\nzwei", "n": [1, None]})}}]
    assert spelt_out(calls) == "function:\nname: write\narguments:\ntext: größer als\nzwei\nn:\n1\nnull"


@pytest.mark.parametrize("text", ["[1, 2", '["\\ud800"]', "[" * 200 + "]" * 200, "[" * 3000, "[Alice]"])
def test_texts_that_only_begin_like_json_are_texts(text):
    assert visit_texts({"a": text}, lambda each, name: f"{name}<{each}>") == {"<a>": f"a<{text}>"}


def test_names_that_become_the_same_are_told_apart():
    assert visit_texts({"x": 1, "y": 2}, lambda each, name: "z") == {"z": 1, "z_": 2}


@pytest.mark.parametrize("levels", [101, 990, 1003])
def test_calls_and_tools_too_deep(levels):
    deep: list = []
    for _ in range(levels - 1):
        deep = [deep]
    for record in ({"messages": [Q, call(deep)]}, {"messages": [Q, call("")], "tools": [{"a": deep}]}):
        with pytest.raises(MalformedRecordError, match="have more than 100 groups one within another"):
            parse_conversation(record, "messages")


def test_what_was_made_of_conversations_before_is_made_anew(tmp_path, monkeypatch):
    """A folder whose conversations were read in another edition may hold what would be redacted now; one of texts is
    kept as it is."""
    for edition, is_reused in ((b"1", False), (b"1", True), (b"2", False)):
        monkeypatch.setattr(megalite.corpus.corpus, "EDITION", edition)
        assert clean_again(tmp_path, conversations="messages").reused == is_reused
    plain = clean_again(tmp_path, text_field="text")
    monkeypatch.setattr(megalite.corpus.corpus, "EDITION", b"3")
    assert not plain.reused
    assert clean_again(tmp_path, text_field="text").reused


def clean_again(folder: Path, **settings: Any) -> StationResult:
    """Clean a conversation, which is a text as well."""
    path, name = folder / "talk.jsonl", "".join(settings)
    path.write_bytes(orjson.dumps({"messages": [Q, {"role": "assistant", "content": "told her"}], "text": "told her"}))
    os.utime(path, (1, 1))
    config = CleanConfig(min_chars=None, max_repeated_line_share=None)
    return clean(Corpus([DocumentSource(path=path, **settings)]), folder / name, config)
