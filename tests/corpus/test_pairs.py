"""Pairs of answers from raw records to samples: shapes, reasons, repair, tokens of both sides; packing parts none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from megalite.config.schema import SourceConfig
from megalite.corpus.conversations import MalformedRecordError, from_metadata, parse_conversation
from megalite.corpus.corpus import Corpus
from megalite.corpus.prepare import prepare
from megalite.corpus.recipe import CleanConfig, DataRecipe
from megalite.corpus.source import DocumentSource
from megalite.corpus.stations.clean import clean
from megalite.corpus.stations.forms import Forms
from megalite.corpus.stations.tokenize import tokenize
from megalite.data.pack import pack
from megalite.data.samples import Samples, open_samples
from megalite.data.settings import PackConfig
from megalite.data.sources import check_pairs
from megalite.errors import DataError
from megalite.tokenizer.settings import ChatConfig
from tests.corpus.test_conversations import TEMPLATE

Q = {"role": "user", "content": "two and two?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("four", "five, or six"))
SIDES = ("messages", "rejected")
EARLIER = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello to you"}]
UNLEARNT = [EARLIER[0], {**EARLIER[1], "weight": 0.0}]

SHAPES = {
    "texts": ({"prompt": "two and two?", "chosen": "four", "rejected": "five, or six"}, [Q]),
    "messages": ({"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]}, [Q]),
    "whole conversations": ({"chosen": [*EARLIER, Q, GOOD], "rejected": [*EARLIER, Q, BAD]}, [*UNLEARNT, Q]),
    "shared answers of other weights": (
        {"chosen": [*EARLIER, Q, GOOD], "rejected": [EARLIER[0], {**EARLIER[1], "weight": 2.0}, Q, BAD]},
        [*UNLEARNT, Q],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_the_same_pair(name):
    """Told by its fields alone; what both sides share is not learnt."""
    fields, shared = SHAPES[name]
    assert parse_conversation(fields, "auto") == {"messages": [*shared, GOOD], "rejected": [*shared, BAD]}


MALFORMED = {
    "no field prompt": {"chosen": "four", "rejected": "five"},
    "chosen and rejected are the same": {"prompt": "x", "chosen": "four", "rejected": "four"},
    "chosen and rejected do not part at an answer, and end with one": {
        "chosen": [Q, GOOD],
        "rejected": [{**Q, "content": "three and three?"}, BAD],
    },
    "weight of a pair": {"prompt": "x", "chosen": "four", "rejected": "five", "weight": 2.0},
    "rejected is no text and no list": {"prompt": "x", "chosen": "four", "rejected": 5},
    "empty content of assistant": {"prompt": "x", "chosen": "four", "rejected": " "},
    "no answer": {"prompt": [Q], "chosen": [GOOD], "rejected": [Q]},
    "a side without an answer of its own with a weight above 0": {
        "chosen": [*EARLIER, Q, GOOD],
        "rejected": [*EARLIER, Q, {**BAD, "weight": 0.0}],
    },
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_what_is_no_pair_has_a_reason(reason):
    with pytest.raises(MalformedRecordError) as error:
        parse_conversation(MALFORMED[reason], "auto")
    assert str(error.value) == reason


def test_sides_that_differ_in_weights_alone_are_the_same():
    record = {"chosen": [Q, {**GOOD, "weight": 1.0}], "rejected": [Q, GOOD]}
    with pytest.raises(MalformedRecordError, match="chosen and rejected are the same"):
        parse_conversation(record, "auto")


def pairs(count: int) -> list[dict]:
    """Records whose answers are of many lengths."""
    words = np.random.default_rng(1).integers(1, 30, (count, 2)).tolist()
    return [
        {"id": str(n), "prompt": f"number {n}?", "chosen": "yes " * a + "so", "rejected": "no " * b}
        for n, (a, b) in enumerate(words)
    ]


def write(path: Path, records: list[dict]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in records))
    return path


def corpus_of(path: Path) -> Corpus:
    return Corpus([DocumentSource(path=path, conversations="preference")])


def sides_of(samples: Samples) -> list[tuple[list[int], list[int]]]:
    """Chosen and rejected side of every pair in some samples: tokens, in the order in which they stand."""
    found = []
    for number in range(samples.num_samples_per_epoch):
        sample = samples.sample(number)
        ids = [each for each in dict.fromkeys(sample.document_ids.tolist()) if each >= 0]
        assert len(ids) % 2 == 0
        for first, second in zip(ids[::2], ids[1::2], strict=True):
            assert second == first + 1
            assert first % 2 == 0
            found.append(tuple(sample.tokens[sample.document_ids == each].tolist() for each in (first, second)))
    return found


def test_a_recipe_of_pairs(tmp_path, tokenizer_folder):
    """From records to samples: both sides are what transformers' template makes of them, side by side in one sample
    whatever the windows, each once; personal data goes from both; what fits nowhere is counted."""
    long = {"id": "long", "prompt": "x", "chosen": "yes " * 400, "rejected": "no"}
    records = [*pairs(60), long, {**pairs(1)[0], "id": "mail", "rejected": "write to me@firm.org"}]
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    recipe = DataRecipe.model_validate(
        {
            "out": tmp_path / "out",
            "sources": [{"path": write(tmp_path / "pairs.jsonl", records), "conversations": "auto"}],
            "clean": {"min_chars": None, "max_repeated_line_share": None, "privacy": {}, "gopher_repetition": None},
            "tokenizer": {"path": tokenizer_folder},
            "valid_fraction": 0.0,
            "chat": {"template": tmp_path / "chat.jinja"},
            "pack": {"seq_len": 200},
        }
    )
    prepare(recipe)
    table = pq.read_table(tmp_path / "out/clean/part-00000.parquet")
    kept = [from_metadata(each) for each in table.column("metadata").to_pylist()]
    assert "me@firm.org" not in str(kept)
    assert "me@firm.org" not in str(table.column("text").to_pylist())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out/chat-tokenizer")
    expected = sorted(
        tuple(tokenizer.apply_chat_template(pair[side], return_dict=True)["input_ids"] for side in SIDES)
        for pair in kept
        if len(pair["messages"][1]["content"]) < 1000
    )
    options = {"seq_len": 200, "seed": 1, "document_masks": True}
    samples = open_samples([SourceConfig(path=tmp_path / "out/packed/train")], **options)
    assert all(source.is_paired for source in samples.sources)
    assert sorted(sides_of(samples)) == expected
    counts = orjson.loads((tmp_path / "out/tokens/train/manifest.json").read_bytes())["counts"]
    assert (counts["pairs"], counts["documents"]) == (61, 122)
    assert counts["rejected"] == {"conversation: too long": 1}
    pack(tmp_path / "out/tokens/train", tmp_path / "windows", PackConfig(seq_len=200, window_documents=7))
    assert sorted(sides_of(open_samples([SourceConfig(path=tmp_path / "windows")], **options))) == expected


def test_pairs_go_with_nothing_else(tmp_path, tokenizer_folder):
    """Plain conversations among them, concatenation, sequences that are too short, learning of all turns and
    descriptions: refused by name, and no folder is left."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chat = ChatConfig(template=tmp_path / "chat.jinja", max_tokens=300)
    of_pairs = DocumentSource(path=write(tmp_path / "pairs.jsonl", pairs(5)), conversations="preference")
    plain = write(tmp_path / "plain.jsonl", [{"messages": [Q, GOOD]}])
    only, both = Corpus([of_pairs]), Corpus([of_pairs, DocumentSource(path=plain, conversations="messages")])
    out = tmp_path / "tokens"
    with pytest.raises(DataError, match="found 5 pairs of answers among 1 other documents"):
        tokenize(both, tokenizer_folder, out, forms=Forms(chat))
    with pytest.raises(DataError, match=r"chat\.learn: all would learn the questions of pairs"):
        tokenize(only, tokenizer_folder, out, forms=Forms(chat.model_copy(update={"learn": "all"})))
    with pytest.raises(DataError, match="have one description; leave it out"):
        tokenize(only, tokenizer_folder, out, forms=Forms(chat), describe=True)
    assert not (out / "manifest.json").exists()
    tokenize(only, tokenizer_folder, out, forms=Forms(chat))
    with pytest.raises(DataError, match="pairs of answers, which concat would cut"):
        pack(out, tmp_path / "packed", PackConfig(seq_len=300, method="concat"))
    with pytest.raises(DataError, match=r"of its pairs of answers are longer than seq_len=20.*pack to \d+"):
        pack(out, tmp_path / "packed", PackConfig(seq_len=20))
    assert not (tmp_path / "packed").exists()
    pack(out, tmp_path / "packed", PackConfig(seq_len=300))
    options = {"seq_len": 300, "seed": 1, "document_masks": True}
    with pytest.raises(DataError, match="of which the second would be learnt as well"):
        check_pairs(open_samples([SourceConfig(path=tmp_path / "packed")], **options).sources, are_wanted=False)
    weighed = open_samples([SourceConfig(path=tmp_path / "packed", loss_weight=2.0)], **options)
    with pytest.raises(DataError, match="loss_weight=2 weighs tokens, not pairs"):
        check_pairs(weighed.sources, are_wanted=True)


def test_docstrings_make_pairs(tmp_path):
    """A definition's own sentence is chosen, its words in another order rejected."""
    source = Corpus([DocumentSource(kind="python", conversations="docstring_pairs", max_mb=0.2)])
    clean(source, tmp_path / "out", CleanConfig(min_chars=None, max_repeated_line_share=None))
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    found = [from_metadata(each) for each in table.column("metadata").to_pylist()]
    assert len(found) > 20
    assert all(each["messages"][:-1] == each["rejected"][:-1] for each in found)
    chosen, rejected = ([each[side][-1]["content"].split() for each in found] for side in SIDES)
    assert all(a != b and sorted(a) == sorted(b) for a, b in zip(chosen, rejected, strict=True))
