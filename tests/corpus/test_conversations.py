"""Conversations from raw records to weighted tokens: shapes, reasons, repair, stations, and what comes of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from megalite.config.schema import SourceConfig
from megalite.corpus.card.make import make_card
from megalite.corpus.conversations import MalformedRecordError, from_metadata, parse_conversation
from megalite.corpus.corpus import Corpus
from megalite.corpus.prepare import load_recipe, prepare
from megalite.corpus.recipe import CleanConfig, DataRecipe
from megalite.corpus.source import DocumentSource
from megalite.corpus.spans.settings import DecontaminateConfig, LineDedupConfig, SubstringConfig
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.forms import Forms
from megalite.corpus.stations.spans import decontaminate, line_dedup, substring_dedup
from megalite.corpus.stations.tokenize import tokenize
from megalite.data.indexed import IndexedTokens
from megalite.data.pack import pack
from megalite.data.samples import open_samples
from megalite.data.settings import PackConfig
from megalite.data.show import describe_samples
from megalite.data.verify import complaints, list_path
from megalite.errors import ConfigError, DataError
from megalite.stations.runners import LocalPool
from megalite.tokenizer.settings import ChatConfig
from tests.kit.data import all_bytes, prose, write_json_lines

Q, A = {"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}
S = {"role": "system", "content": "be short"}

SHAPES = {
    "messages": ({"messages": [S, Q, A]}, [S, Q, A]),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "two and two?"}]}, A]}, [Q, A]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "two and two?"}, {"from": "gpt", "value": "four"}], "id": "x"},
        [Q, A],
    ),
    "alpaca": ({"instruction": "two and two?", "input": "", "output": "four"}, [Q, A]),
    "alpaca with input": (
        {"instruction": "add", "input": "2 2", "output": "four", "system": "be short"},
        [S, {"role": "user", "content": "add\n\n2 2"}, A],
    ),
    "alpaca with history": (
        {"instruction": "again?", "output": "four", "history": [["two and two?", "four"]]},
        [Q, A, {"role": "user", "content": "again?"}, A],
    ),
    "prompt and completion": ({"prompt": "two and two?", "completion": "four"}, [Q, A]),
    "an empty system message": ({"messages": [{"role": "system", "content": " "}, Q, A]}, [Q, A]),
    "sharegpt with an empty system": (
        {
            "conversations": [{"from": "human", "value": "two and two?"}, {"from": "gpt", "value": "four"}],
            "system": "",
        },
        [Q, A],
    ),
    "lists of messages": ({"prompt": [S, Q], "completion": [A]}, [S, Q, A]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_the_same_conversation(name):
    """What the published shapes say, told by their fields alone."""
    fields, messages = SHAPES[name]
    assert parse_conversation(fields, "auto")["messages"] == messages


MALFORMED = {
    "no answer": {"messages": [Q]},
    "no answer with a weight above 0": {"messages": [Q, {**A, "weight": 0}]},
    "unknown role critic": {"messages": [Q, A, {"role": "critic", "content": "well"}]},
    "unknown role bot": {"conversations": [{"from": "bot", "value": "x"}]},
    "empty content of user": {"messages": [{**Q, "content": " \n"}, A]},
    "empty content of assistant": {"instruction": "x", "output": ""},
    "an answer without a question": {"messages": [S, A]},
    "a system message that is not the first": {"messages": [Q, A, S]},
    "a message has an unknown key audio": {"messages": [{**Q, "audio": "x"}, A]},
    "weight of a message that is no answer": {"messages": [{**Q, "weight": 1}, A]},
    "weight outside 6.10352e-05 to 1024": {"messages": [Q, A], "weight": 0},
    "weights of a record and a message outside 6.10352e-05 to 1024": {
        "messages": [Q, {**A, "weight": 500}],
        "weight": 200,
    },
    "weight that is no number": {"messages": [Q, A], "weight": float("nan")},
    "content that is no text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]},
    "messages are no list": {"messages": "hello"},
    "a message is no object": {"messages": ["hello"]},
    "fields of no known shape": {"text": "hello"},
    "fields of messages and alpaca": {"messages": [Q, A], "instruction": "x", "output": "y"},
    "half of a surrogate pair": {"prompt": "\ud800", "completion": "x"},
    "tools are no list of objects": {"messages": [Q, A], "tools": ["x"]},
    "tool_calls of another role, or no list": {"messages": [{**Q, "tool_calls": [{}]}, A]},
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_what_is_no_conversation_has_a_reason(reason):
    """One for each way to be none."""
    with pytest.raises(MalformedRecordError) as error:
        parse_conversation(MALFORMED[reason], "auto")
    assert str(error.value) == reason


TALKS = [
    {
        "id": f"t{number}",
        "messages": [{"role": "user", "content": f"Say {text}"}, {"role": "assistant", "content": text}],
    }
    for number, text in enumerate(prose(80))
]


def source_of(path: Path, **settings) -> Corpus:
    return Corpus([DocumentSource(path=path, conversations="auto", **settings)])


def test_files_of_every_kind_hold_the_same(tmp_path):
    """Lines, one array of JSON, also compressed, and a table whose structs have a field for everybody: the same
    documents, and records that are none put aside by reason."""
    bad = [{"messages": [Q]}, {"text": "x"}]
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in [*TALKS, *bad]) + b"[1]\n")
    (tmp_path / "b.json").write_text(json.dumps([*TALKS, *bad, 1], indent=1))
    with_weight = [*TALKS[:-1], {**TALKS[-1], "weight": None}]
    pq.write_table(
        pa.Table.from_pylist([*with_weight, {"messages": [{"role": "user", "content": "x"}]}]), tmp_path / "c.parquet"
    )
    found = {}
    for name in ("a.jsonl", "b.json", "c.parquet"):
        result = clean(
            source_of(tmp_path / name),
            tmp_path / f"{name}-clean",
            CleanConfig(min_chars=None, max_repeated_line_share=None),
        )
        found[name] = result.manifest.counts
        table = pq.read_table(tmp_path / f"{name}-clean" / "part-00000.parquet")
        assert table.column("id").to_pylist() == [each["id"] for each in TALKS]
        own = [from_metadata(each)["messages"] for each in table.column("metadata").to_pylist()]
        assert own == [each["messages"] for each in TALKS]
    reasons = {"conversation: no answer": 1, "conversation: fields of no known shape": 1, "not a JSON object": 1}
    assert found["a.jsonl"]["rejected"] == found["b.json"]["rejected"] == reasons
    assert found["c.parquet"]["rejected"] == {"conversation: no answer": 1}


def test_what_is_said_is_repaired_and_redacted(tmp_path):
    """In the conversation as in the text that is judged; one of which nothing is left goes."""
    talks = [
        {"messages": [{**Q, "content": "cafe\u0301\r\nmail me@firm.org  "}, A]},
        {"messages": [Q, {**A, "content": "\x00\x01"}]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in talks))
    result = clean(
        source_of(path), tmp_path / "out", CleanConfig(min_chars=None, max_repeated_line_share=None, privacy={})
    )
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    (metadata,) = table.column("metadata").to_pylist()
    said = from_metadata(metadata)["messages"][0]["content"]
    assert said.startswith("caf\u00e9\nmail ")
    assert "me@firm.org" not in said
    assert table.column("text").to_pylist() == [f"user: {said}\n\nassistant: four"]
    assert sum(result.manifest.counts["redacted"].values()) == 1
    assert result.manifest.counts["documents"] == 1


def test_no_station_edits_a_conversation(tmp_path):
    """Those that cut texts refuse, by themselves and in a recipe; so does tokenizing without a word of answers."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"messages": [Q, A], "id": str(number)}) + b"\n" for number in range(9)))
    clean(source_of(path), tmp_path / "clean", CleanConfig(min_chars=None, max_repeated_line_share=None))
    cleaned = Corpus([DocumentSource(path=tmp_path / "clean")])
    with pytest.raises(DataError, match="edits texts, and a conversation stays whole or goes"):
        line_dedup(cleaned, tmp_path / "lines", LineDedupConfig())
    with pytest.raises(DataError, match=r"clean\.c4 edits texts"):
        clean(source_of(path), tmp_path / "c4", CleanConfig(min_chars=None, max_repeated_line_share=None, c4={}))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"out: {tmp_path}/out\nsources: [{{path: {path}, conversations: auto}}]\nline_dedup: {{}}\nfim: {{}}\n"
        f"substring_dedup: {{}}\ndecontaminate: {{paths: [{path}], action: cut}}\n"
        "chat: {max_tokens: 4000, too_long: cut, learn: last}\nclean: {c4: {}}\npack: {seq_len: 64}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe)
    parts = ("line_dedup: edits", "clean.c4: edits", "substring_dedup.action: cut", "decontaminate.action: cut")
    for part in (*parts, "chat.max_tokens: 4000", "fim: takes", "too_long: cut leaves"):
        assert part in str(error.value)
    recipe.write_text(f"out: {tmp_path}/out\nsources: [{{path: {path}, conversations: auto}}]\n")
    with pytest.raises(ConfigError, match="chat: is missing: a source has conversations"):
        load_recipe(recipe)


def test_stations_that_drop_take_whole_conversations(tmp_path):
    """Repeated passages, and runs of words of an evaluation set, which here is in the thoughts."""
    texts = prose(4, seed=2)
    answers = [A, {**A, "reasoning_content": texts[0]}, {**A, "content": texts[1]}, {**A, "content": texts[1] + "!"}]
    records = [{"messages": [{**Q, "content": f"question {n}"}, answer]} for n, answer in enumerate(answers)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in records))
    clean(source_of(tmp_path / "a.jsonl"), tmp_path / "clean", CleanConfig(min_chars=None))
    cleaned = Corpus([DocumentSource(path=tmp_path / "clean")])
    exam = write_json_lines(tmp_path / "exam.jsonl", [texts[0]])
    decontaminate(cleaned, tmp_path / "a", DecontaminateConfig(paths=(exam,)))
    substring_dedup(Corpus([DocumentSource(path=tmp_path / "a")]), tmp_path / "b", SubstringConfig(action="drop"))
    for name, numbers in (("a", (0, 2, 3)), ("b", (0, 2))):
        table = pq.read_table(tmp_path / name / "part-00000.parquet")
        kept = [from_metadata(each)["messages"] for each in table.column("metadata").to_pylist()]
        assert kept == [records[number]["messages"] for number in numbers]


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}Q: {{ m.content }}\nA:{% endif %}{% endfor %}"
)


def write_recipe(tmp_path: Path, tokenizer: Path, **more) -> DataRecipe:
    """Eighty conversations, a long one, one that is none, and plain texts, with a template of one's own."""
    long = {"messages": [Q, A] * 90}
    talks = [*TALKS, {**long, "id": "long"}, {"messages": [Q]}]
    (tmp_path / "talks.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in talks))
    write_json_lines(tmp_path / "plain.jsonl", prose(30, seed=5))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return DataRecipe.model_validate(
        {
            "out": tmp_path / "out",
            "sources": [
                {"path": tmp_path / "talks.jsonl", "conversations": "messages"},
                {"path": tmp_path / "plain.jsonl"},
            ],
            "valid_fraction": 0.1,
            "clean": {"min_chars": None, "max_repeated_line_share": None},
            "tokenizer": {"path": tokenizer},
            "chat": {"template": tmp_path / "chat.jinja", **more},
            "pack": {"seq_len": 700},
        }
    )


def test_a_recipe_of_conversations(tmp_path, tokenizer_folder, monkeypatch):
    """From records to samples: ids and mask are transformers' with the tokenizer that the recipe leaves, plain texts
    are learnt whole, what does not fit is counted, files are whole, the card counts, workers make the same bytes."""
    monkeypatch.setattr("megalite.corpus.shards.SMALLEST_SHARD", 3_000)
    recipe = write_recipe(tmp_path, tokenizer_folder)
    prepare(recipe)
    first = all_bytes(tmp_path / "out")
    train = IndexedTokens(tmp_path / "out/tokens/train/tokens", weighted=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out/chat-tokenizer")
    expected = {}
    for talk in TALKS:
        found = tokenizer.apply_chat_template(
            talk["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        expected[tuple(found["input_ids"])] = found["assistant_masks"]
    num_plain = 0
    for start, stop in np.stack(
        [train.document_starts(0, train.num_documents), train.document_starts(1, train.num_documents + 1)], 1
    ):
        ids, weights = train.read(start, stop).tolist(), train.read_weights(start, stop)
        num_plain += tuple(ids) not in expected
        assert weights.tolist() == expected.get(tuple(ids), [1.0] * len(ids))
    counts = json.loads(first["tokens/train/manifest.json"])["counts"]
    assert counts["conversations"] + num_plain == train.num_documents
    assert num_plain > 10
    dropped = counts["rejected"] | json.loads(first["clean/manifest.json"])["counts"]["rejected"]
    assert dropped == {"conversation: too long": 1, "conversation: no answer": 1}
    card = make_card(tmp_path / "out", recipe)
    assert (
        card.splits[0].tokens_learnt
        == counts["tokens_learnt"]
        == int((train.read_weights(0, train.num_tokens) > 0).sum())
    )
    listing = list_path(tmp_path / "out")
    assert not [*listing.problems, *complaints(listing.checks, threads=1)]

    samples = open_samples([SourceConfig(path=tmp_path / "out/packed/train")], seq_len=700, seed=1, document_masks=True)
    assert samples.tokenizer_path.name == "chat-tokenizer"
    shown = "\n".join(describe_samples(samples, range(4)))
    assert "\u00ab" in shown
    assert "</s>\u00bb" in shown
    assert "\x1b[32m" in "\n".join(describe_samples(samples, range(4), colour=True))

    moved = tmp_path / "out"
    moved.rename(tmp_path / "first")
    with LocalPool(2) as runner:
        prepare(recipe, runner=runner)
    again = all_bytes(tmp_path / "out")
    assert {name: content for name, content in again.items() if name.startswith("tokens/")} == {
        name: content for name, content in first.items() if name.startswith("tokens/")
    }


def test_cut_or_refused_as_the_recipe_says(tmp_path, tokenizer_folder):
    """The long conversation is cut behind an answer and counted; or what cannot be learnt ends the station."""
    prepare(write_recipe(tmp_path, tokenizer_folder, too_long="cut"))
    counts = json.loads((tmp_path / "out/tokens/train/manifest.json").read_text())["counts"]
    assert (counts["conversations_cut"], counts["rejected"]) == (1, {})
    assert counts["messages_cut"] % 2 == 0
    packed = json.loads((tmp_path / "out/packed/train/manifest.json").read_text())["counts"]
    assert (packed["cuts_in_learnt"], packed["documents_split"]) == (0, 0)
    with pytest.raises(DataError, match=r"long: too long; set chat\.on_error: drop"):
        prepare(write_recipe(tmp_path, tokenizer_folder, on_error="fail"))


def test_packing_says_where_it_cuts_answers(tmp_path, tokenizer_folder):
    """Counted against a walk over all borders, in both layouts."""
    path = tmp_path / "talks.jsonl"
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in TALKS))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chat = ChatConfig(template=tmp_path / "chat.jinja", max_tokens=4096)
    tokenize(source_of(path), tokenizer_folder, tmp_path / "tokens", forms=Forms(chat))
    tokens = IndexedTokens(tmp_path / "tokens/tokens", weighted=True)
    weights, starts = tokens.read_weights(0, tokens.num_tokens), tokens.document_starts(0, tokens.num_documents + 1)
    for method in ("concat", "best_fit"):
        result = pack(tmp_path / "tokens", tmp_path / method, PackConfig(seq_len=40, method=method))
        expected = 0
        for start, stop in itertools.pairwise(starts):
            for cut in range(start + 1, stop):
                is_border = cut % 40 == 0 if method == "concat" else (cut - start) % 40 == 0
                expected += is_border and weights[cut - 1] > 0 and weights[cut] > 0
        assert result.manifest.counts["cuts_in_learnt"] == expected > 0


def test_nothing_to_learn_is_a_mistake(tmp_path, tokenizer_folder):
    """`chat` over plain texts alone, and conversations without it."""
    plain = Corpus([DocumentSource(path=write_json_lines(tmp_path / "a.jsonl", prose(5)))])
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chat = ChatConfig(template=tmp_path / "chat.jinja", max_tokens=99)
    with pytest.raises(DataError, match="no document is a conversation that can be learnt"):
        tokenize(plain, tokenizer_folder, tmp_path / "out", forms=Forms(chat))
    (tmp_path / "b.jsonl").write_bytes(orjson.dumps({"messages": [Q, A]}) + b"\n")
    with pytest.raises(DataError, match="found conversations: say what of them is learnt"):
        tokenize(source_of(tmp_path / "b.jsonl"), tokenizer_folder, tmp_path / "out")


def test_docstrings_are_questions_and_answers(tmp_path):
    """Each is a public function or class of a module of Python's own library, answered by its docstring."""
    corpus = Corpus([DocumentSource(kind="python", conversations="docstrings", max_mb=0.4)])
    documents = list(corpus.documents())
    assert len(documents) > 50
    by_name = {each.id: from_metadata(each.metadata)["messages"] for each in documents}
    (asked, answered) = by_name["library/_collections_abc.py:Sequence.index"]
    assert asked["content"].endswith(("do?", "for?", ".", "?"))
    assert "_collections_abc.Sequence.index(value, start, stop)" in asked["content"]
    assert answered["content"].startswith("S.index(value, [start, [stop]]) -> integer -- return first index of value.")
