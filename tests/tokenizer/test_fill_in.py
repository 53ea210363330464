"""Fill-in-the-middle: texts come back whole, parts are encoded by themselves, cuts are uniform, contexts fit."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.errors import DataError
from megalite.tokenizer.fill_in import FillIn
from megalite.tokenizer.settings import FillInConfig, TokenizerConfig
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.tokenizer.training import write_tokenizer
from tests.kit.data import prose

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Byte-level BPE with the three control tokens."""
    folder = tmp_path_factory.mktemp("fim")
    write_tokenizer(iter(prose(300)), folder, TokenizerConfig(kind="byte-bpe", vocab_size=300, special_tokens=NAMES))
    return Tokenizer.load(folder)


def take_back(ids: list[int], tokenizer: Tokenizer) -> tuple[str, list[str]] | None:
    """The order, and prefix, middle and suffix, of a document with a hole, slowly and by the paper; None without one.
    The parts must be the ids of their texts."""
    prefix, suffix, middle = (tokenizer.special_tokens[name] for name in NAMES)
    if prefix not in ids:
        return None
    assert ids[0] == prefix
    assert ids[-1] == tokenizer.eos_id
    behind_suffix, behind_middle = ids.index(suffix) + 1, ids.index(middle) + 1
    before, between, last = ids[1 : behind_suffix - 1], ids[behind_suffix : behind_middle - 1], ids[behind_middle:-1]
    assert [ids.count(each) for each in (prefix, suffix, middle)] == [1, 1, 1]
    assert tokenizer.encode(tokenizer.decode(between)) == between
    if behind_suffix == 2:
        return "spm", [tokenizer.decode(last), "", tokenizer.decode(between)]
    assert tokenizer.encode(tokenizer.decode(before)) == before
    assert tokenizer.encode(tokenizer.decode(last)) == last
    return "psm", [tokenizer.decode(before), tokenizer.decode(last), tokenizer.decode(between)]


def test_documents_are_taken_apart_as_published(tokenizer):
    """Of 2,000 texts: each comes back whole; half have a hole, a quarter of these in the order SPM; both cuts together
    lie as two uniform numbers do, in quartiles; characters of several bytes are never cut."""
    texts = [f"{text} \u00e9\U0001f600" for text in prose(2000)]
    fill_in = FillIn(tokenizer, FillInConfig(rate=0.5, spm_rate=0.25), seed=3, seq_len=None)
    orders, places = [], []
    for text in texts:
        (ids,) = fill_in.encode(text)
        found = take_back(ids, tokenizer)
        orders.append(found and found[0])
        if found is None:
            assert ids == [*tokenizer.encode(text), tokenizer.eos_id]
            continue
        assert "".join(found[1]) == text
        if found[0] == "psm":
            places.append([len(found[1][0]) / len(text), (len(found[1][0]) + len(found[1][1])) / len(text)])
    num_spm, num_psm = orders.count("spm"), orders.count("psm")
    assert abs(num_spm + num_psm - 1000) < 5 * np.sqrt(500)
    assert abs(num_spm - 250) < 5 * np.sqrt(190)
    assert 0 <= num_spm - fill_in.counts["spm"] <= 10  # PSM without a prefix is written as SPM is
    assert fill_in.counts["spm"] + fill_in.counts["psm"] == num_spm + num_psm
    for column, power in ((0, 1), (1, 2)):  # the smaller of two uniform numbers, and the larger
        values = 1 - np.array(places)[:, 0] if column == 0 else np.array(places)[:, 1]
        for quantile in (0.25, 0.5, 0.75):
            expected = quantile ** (2 if column == 0 else power)
            assert abs((values <= quantile).mean() - expected) < 5 * np.sqrt(0.25 / len(values)) + 0.01


def test_what_becomes_of_a_text_follows_from_seed_and_text(tokenizer):
    """The same in any order and company; another seed takes others apart."""
    texts, config = prose(60), FillInConfig()
    one = FillIn(tokenizer, config, seed=1, seq_len=None)
    two = FillIn(tokenizer, config, seed=1, seq_len=None)
    other = FillIn(tokenizer, config, seed=2, seq_len=None)
    found = {text: list(one.encode(text)) for text in texts}
    assert found == {text: list(two.encode(text)) for text in reversed(texts)}
    assert found != {text: list(other.encode(text)) for text in texts}


@pytest.mark.parametrize("seq_len", [16, 40, 150])
def test_contexts_fit_and_nothing_is_lost(tokenizer, seq_len):
    """Pieces with a hole are no longer than a sequence, wherever they were cut; all pieces together are the text."""
    fill_in = FillIn(tokenizer, FillInConfig(rate=0.6, level="context"), seed=1, seq_len=seq_len)
    for text in (*prose(20), "\n".join(prose(30)), "x", "\U0001f600" * 60):
        said = ""
        for ids in fill_in.encode(text):
            found = take_back(ids, tokenizer)
            if found is not None:
                assert len(ids) <= seq_len
            said += "".join(found[1]) if found else tokenizer.decode(ids)
        assert said == text
    assert fill_in.counts["psm"]
    assert fill_in.counts["spm"]


def test_missing_tokens_are_named(tokenizer, tokenizer_folder):
    """A tokenizer without them, and one that has others."""
    with pytest.raises(DataError, match=r"no control token <\|fim_prefix\|> and no <\|fim_suffix\|> and no"):
        FillIn(Tokenizer.load(tokenizer_folder), FillInConfig(), seed=1, seq_len=None)
    with pytest.raises(DataError, match="has no control token <PRE>, which fim needs"):
        FillIn(tokenizer, FillInConfig(tokens={"prefix": "<PRE>"}), seed=1, seq_len=None)
