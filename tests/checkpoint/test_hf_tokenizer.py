"""Tokenizers of exported models: ids as in training, whoever made the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.families.registry import exportable
from megalite.checkpoint.hf.generate import generate
from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
from megalite.checkpoint.hf.tokenizer_files import copy_tokenizer
from megalite.corpus.stations.chat_tokenizer import chat_tokenizer
from megalite.errors import ConversionError, DataError
from megalite.tokenizer.chat import ChatEncoder
from megalite.tokenizer.settings import ChatConfig
from megalite.tokenizer.tokenizer import HUGGING_FACE, Tokenizer, TokenizerInfo, write_info
from tests.checkpoint.foreign import edit_tensors
from tests.checkpoint.hf_kit import (
    TOKENIZER_KINDS,
    TOKENIZER_SIZE,
    reload_here,  # noqa: F401 (a fixture)
    tiny_model,
    train_tokenizers,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small tokenizer of each kind, trained on this project's own text."""
    return train_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def _checkpoint(run: Path, vocab_size: int = TOKENIZER_SIZE, tokenizer: Path | None = None, **fields: object) -> None:
    data = {"tokenizer": str(tokenizer)} if tokenizer else None
    write_checkpoint(run, tiny_model(vocab_size=vocab_size, **fields), data=data)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.usefixtures("reload_here")
def test_own_tokenizers_keep_their_ids(kind: str, tokenizers: Path, tmp_path: Path):
    """The recorded tokenizer travels along, plain AutoTokenizer gives its ids, and its special ids are the config's."""
    _checkpoint(tmp_path, tokenizer=tokenizers / kind, num_kv_heads=2, sliding_window=8)
    done = to_hugging_face(tmp_path, tmp_path / "hf")
    assert done.verdict.num_texts > 40
    assert done.notes == ()
    assert (tmp_path / "hf" / "tokenizer.model").is_file() == kind.startswith("sentencepiece")
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").model_max_length == tiny_model().max_positions
    own, config = Tokenizer.load(tokenizers / kind), json.loads((tmp_path / "hf" / "config.json").read_text())
    ids = {f"{role}_token_id": getattr(own, f"{role}_id") for role in ("bos", "eos", "pad")}
    assert {key: config[key] for key in ids} == ids
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == ids
    assert Tokenizer.load(tmp_path / "hf").kind == kind


@pytest.mark.usefixtures("reload_here")
def test_tokenizer_saved_by_transformers(tokenizers: Path, tmp_path: Path):
    """A folder in the style of transformers 5 is accepted, and rewritten so that version 4 can read it too."""
    saved = tmp_path / "saved"
    AutoTokenizer.from_pretrained(tokenizers / "byte-bpe").save_pretrained(saved)
    config = json.loads((saved / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "TokenizersBackend"
    (saved / "tokenizer_config.json").write_text(json.dumps({**config, "extra_special_tokens": ["<pad>"]}))

    _checkpoint(tmp_path)
    to_hugging_face(tmp_path, tmp_path / "hf", tokenizer=saved)
    written = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<pad>"]
    assert "extra_special_tokens" not in written
    assert Tokenizer.load(tmp_path / "hf").kind == HUGGING_FACE


@pytest.mark.usefixtures("reload_here")
def test_class_that_adds_of_its_own(tokenizers: Path, tmp_path: Path):
    """A class that reads tokenizer.json otherwise is noted on import; an export means what the file says."""
    _checkpoint(tmp_path, tokenizer=tokenizers / "sentencepiece-bpe")
    to_hugging_face(tmp_path, tmp_path / "hf")
    for name in ("megalite_tokenizer.json", "tokenizer.model"):
        (tmp_path / "hf" / name).unlink()
    path = tmp_path / "hf" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "LlamaTokenizer"}))
    done = from_hugging_face(tmp_path / "hf", tmp_path / "base")
    assert done.verdict.num_texts == 0
    assert "by its tokenizer.json: find out which" in done.notes[0]
    again = to_hugging_face(tmp_path / "base", tmp_path / "again")
    assert again.verdict.num_texts > 40


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff", 10**5 * b"["])
@pytest.mark.usefixtures("reload_here")
def test_a_damaged_tokenizer_config(damage: bytes, tokenizers: Path, tmp_path: Path):
    """Is named, and the model is there without a tokenizer."""
    _checkpoint(tmp_path, tokenizer=tokenizers / "byte-bpe")
    to_hugging_face(tmp_path, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer_config.json").write_bytes(damage)
    done = from_hugging_face(tmp_path / "hf", tmp_path / "base")
    assert any("Imported without a tokenizer" in note for note in done.notes)


@pytest.mark.usefixtures("reload_here")
def test_tokenizer_that_transformers_reads_otherwise(tokenizers: Path, tmp_path: Path):
    """When tokenizer.json is not the SentencePiece model that training used, the first differing text is shown."""
    forged = tmp_path / "forged"
    forged.mkdir()
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (forged / name).write_bytes((tokenizers / "sentencepiece-bpe" / name).read_bytes())
    (forged / "tokenizer.json").write_bytes((tokenizers / "sentencepiece-unigram" / "tokenizer.json").read_bytes())
    write_info(forged, TokenizerInfo("sentencepiece-bpe", TOKENIZER_SIZE, eos_id=2, bos_id=1, pad_id=3))

    _checkpoint(tmp_path)
    with pytest.raises(ConversionError, match=r"transformers tokenizes '.*' as .*, training as"):
        to_hugging_face(tmp_path, tmp_path / "hf", tokenizer=forged)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.usefixtures("reload_here")
def test_tokenizers_of_a_qwen2_model(kind: str, tokenizers: Path, tmp_path: Path):
    """transformers 5 takes every tokenizer in a Qwen2 folder for Qwen2's. With one of ours the model can be exported
    alone, which the refusal says, and `config check` beforehand."""
    _checkpoint(tmp_path, tokenizer=tokenizers / kind, bias="qkv")
    assert "has to be Qwen2's" in exportable(tiny_model(bias="qkv")).condition
    with pytest.raises(ConversionError, match="in a folder of Qwen2ForCausalLM; export with --tokenizer none"):
        to_hugging_face(tmp_path, tmp_path / "hf")
    assert to_hugging_face(tmp_path, tmp_path / "hf", tokenizer="none").architecture == "Qwen2ForCausalLM"


def test_vocabulary_that_does_not_fit(tokenizers: Path, tmp_path: Path):
    """A tokenizer with more tokens than the model has rows is refused before anything is written."""
    _checkpoint(tmp_path, vocab_size=TOKENIZER_SIZE - 1)
    with pytest.raises(
        ConversionError, match=rf"{TOKENIZER_SIZE} tokens, the model has vocab_size={TOKENIZER_SIZE - 1}"
    ):
        to_hugging_face(tmp_path, tmp_path / "hf", tokenizer=tokenizers / "byte-bpe")
    assert not list(tmp_path.glob("hf*"))


@pytest.mark.usefixtures("reload_here")
def test_spare_rows_are_noted(tokenizers: Path, tmp_path: Path):
    """A model with more rows than the tokenizer has tokens is exported whole, and that is said."""
    _checkpoint(tmp_path, vocab_size=TOKENIZER_SIZE + 28, tokenizer=tokenizers / "byte-bpe")
    assert to_hugging_face(tmp_path, tmp_path / "hf").notes == (
        "28 rows of the vocabulary have no token in the tokenizer.",
    )


@pytest.mark.usefixtures("reload_here")
def test_recorded_tokenizer_that_is_gone(tmp_path: Path):
    """A recorded tokenizer that is not there any more is asked for; `none` exports without, loudly."""
    _checkpoint(tmp_path, tokenizer=tmp_path / "gone")
    with pytest.raises(ConversionError, match="--tokenizer"):
        to_hugging_face(tmp_path, tmp_path / "hf")
    done = to_hugging_face(tmp_path, tmp_path / "hf", tokenizer="none")
    assert any("without a tokenizer" in note for note in done.notes)
    with pytest.raises(DataError, match="no such folder"):
        to_hugging_face(tmp_path, tmp_path / "other", tokenizer=tmp_path / "nowhere")


@pytest.mark.usefixtures("reload_here")
def test_there_and_back_with_tokenizer(tokenizers: Path, tmp_path: Path):
    """An import keeps the tokenizer beside the checkpoint, finds it again when moved, and exports the same ids."""
    _checkpoint(tmp_path, tokenizer=tokenizers / "sentencepiece-bpe")
    to_hugging_face(tmp_path, tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "back")
    (tmp_path / "back").rename(tmp_path / "moved")
    again = to_hugging_face(tmp_path / "moved", tmp_path / "again")
    assert again.notes == ()  # imported, so step 0 does not mean untrained
    first, second = Tokenizer.load(tmp_path / "hf"), Tokenizer.load(tmp_path / "again")
    assert first.fingerprint == second.fingerprint
    assert "| began as | hf |" in (tmp_path / "again" / "README.md").read_text()


@pytest.mark.usefixtures("reload_here")
def test_generate(tokenizers: Path, tmp_path: Path):
    """Text goes on from the prompt, the same for the same seed; too long a text is refused with what would fit."""
    _checkpoint(tmp_path, tokenizer=tokenizers / "byte-bpe")
    to_hugging_face(tmp_path, tmp_path / "hf")
    text = generate(tmp_path / "hf", "def f", max_new_tokens=8, seed=3)
    assert text.startswith("def f")
    assert text == generate(tmp_path / "hf", "def f", max_new_tokens=8, seed=3)
    assert isinstance(generate(tmp_path / "hf", "", max_new_tokens=4, temperature=0.0), str)
    with pytest.raises(ConversionError, match=r"use --max-new-tokens \d+"):
        generate(tmp_path / "hf", "def f", max_new_tokens=40)
    with pytest.raises(ConversionError, match=r"no config\.json"):
        generate(tmp_path, "def f")
    edit_tensors(tmp_path / "hf", **{"model/norm/weight": torch.full((48,), torch.nan)})
    with pytest.raises(ConversionError, match=r"model\.norm\.weight holds NaN"):
        generate(tmp_path / "hf", "def f")
    edit_tensors(tmp_path / "hf", "model.norm.weight")
    with pytest.raises(ConversionError, match=r"model\.norm\.weight of 1 tensors are not there"):
        generate(tmp_path / "hf", "def f")
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConversionError, match="transformers cannot load it"):
        generate(tmp_path / "hf", "def f")


def test_a_chat_template_travels(tmp_path, tokenizer_folder):
    """An export has the template of the data's tokenizer, and transformers reads its turns' tokens as such: the ids
    that were trained on."""
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA:{% else %}{% generation %} "
        "{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    chat_tokenizer(tokenizer_folder, template, tmp_path / "chat-tokenizer")
    (tmp_path / "hf").mkdir()
    copy_tokenizer(tmp_path / "chat-tokenizer", tmp_path / "hf")
    talk = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "four"}]
    read = AutoTokenizer.from_pretrained(tmp_path / "hf")
    found = read.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    own = Tokenizer.load(tokenizer_folder)
    encoder = ChatEncoder(tmp_path / "chat-tokenizer", ChatConfig(max_tokens=99), own.eos_id)
    encoded = encoder.encode({"messages": talk})
    assert encoded.ids.tolist() == found["input_ids"]
    assert (encoded.weights > 0).astype(int).tolist() == found["assistant_masks"]
    assert encoded.ids[-1] == own.eos_id
