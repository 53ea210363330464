"""Embeddings against transformers, one document at a time and without padding; folders that make none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from megalite.checkpoint.hf.embed import TextEmbedder
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.errors import ConversionError, DataError, UnavailableError
from tests.checkpoint.hf_kit import TOKENIZER_SIZE, reloading_here, tiny_model, train_tokenizers, write_checkpoint
from tests.kit.encoders import MAX_POSITIONS, NUM_LAYERS, write_encoder

ROUNDING = 3e-6
"""Of fp32 numbers up to 1, behind two layers whose products have another shape with padding."""

TEXTS = ("a", "def f(x):\n    return x", "é" * 30, "words " * 40, "one more text", "", "x" * 95, "a")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder of transformers, an encoder, and an export of ours."""
    root = tmp_path_factory.mktemp("encoders")
    tokenizer = train_tokenizers(root, ["byte-bpe"]) / "byte-bpe"
    model = tiny_model(vocab_size=TOKENIZER_SIZE, num_layers=NUM_LAYERS, max_positions=MAX_POSITIONS)
    write_checkpoint(root / "run", model, data={"tokenizer": str(tokenizer)})
    with reloading_here():
        to_hugging_face(root / "run", root / "export")
    names = {name: write_encoder(root / name, name) for name in ("llama", "bert")}
    return {**names, "export": root / "export"}


def alone(folder: Path, text: str, pooling: str, layer: int, max_tokens: int) -> np.ndarray:
    """The truth: one document, no padding, every hidden state that transformers hands out."""
    ids = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=max_tokens, return_tensors="pt")[
        "input_ids"
    ]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[layer][0].double().numpy()
    pooled = {"mean": states.mean(axis=0), "last": states[-1], "first": states[0]}[pooling]
    return pooled / np.linalg.norm(pooled)


@pytest.mark.parametrize("name", ["llama", "bert", "export"])
def test_embeddings_are_those_of_single_documents(folders: dict[str, Path], name: str):
    """Of every pooling, some layers and lengths, in batches of unlike documents; ids, and what is cut, too."""
    folder = folders[name]
    texts = [text for text in TEXTS if text or name == "bert"]
    for pooling, layer, max_tokens in (("mean", -1, 50), ("last", -1, MAX_POSITIONS), ("mean", 1, 7), ("first", 0, 50)):
        ours = TextEmbedder(folder, pooling=pooling, layer=layer, max_tokens=max_tokens)
        ids, cut = ours.ids(texts)
        plain = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in texts]
        assert cut.tolist() == [len(each) > max_tokens for each in plain]
        assert max(map(len, ids)) <= max_tokens
        sequences = [np.array(each) for each in ids]
        found = ours.embed(sequences, batch_tokens=120)
        wanted = np.stack([alone(folder, text, pooling, layer, max_tokens) for text in texts])
        assert np.abs(found - wanted).max() < ROUNDING
        assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < ROUNDING
        assert np.array_equal(found, ours.embed(sequences, batch_tokens=120))
        assert np.abs(found - ours.embed(sequences, batch_tokens=1)).max() < ROUNDING  # one by one


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def test_folders_that_make_no_embeddings_are_refused_by_name(folders: dict[str, Path], tmp_path: Path):
    """Without a model, weights or tokenizer; pickles; damage; NaN; no such layer, positions, pooling or device."""
    good = folders["bert"]

    def refused(said: str, folder: Path = good, error: type[Exception] = ConversionError, **options) -> None:
        with pytest.raises(error, match=said):
            TextEmbedder(folder, **options)

    refused("none: no such folder", tmp_path / "none")
    folder = copied(good, tmp_path / "config")
    (folder / "config.json").unlink()
    refused("config: no model: there is no config.json", folder)
    folder = copied(good, tmp_path / "pickle")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused("pickle: no model: there is no .safetensors in it, and pickles are not read", folder)
    folder = copied(good, tmp_path / "tokenizer")
    (folder / "tokenizer.json").unlink()
    refused("tokenizer: no tokenizer: none of tokenizer.json", folder)
    folder = copied(good, tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    refused("damaged: transformers cannot load it", folder)
    folder = copied(good, tmp_path / "kind")
    (folder / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    refused("kind: transformers cannot read config.json", folder)
    folder = copied(good, tmp_path / "t5")
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    refused("t5: an encoder with a decoder", folder)

    weights = load_file(good / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    folder = copied(good, tmp_path / "nan")
    save_file({**weights, name: weights[name] * float("nan")}, folder / "model.safetensors", {"format": "pt"})
    refused(f"nan: {name} holds NaN", folder)
    folder = copied(good, tmp_path / "lacking")
    save_file(
        {key: each for key, each in weights.items() if key != name}, folder / "model.safetensors", {"format": "pt"}
    )
    refused(f"lacking: {name} of 1 tensors are not there", folder)
    folder = copied(good, tmp_path / "pooler")  # which is not used
    left = {key: each for key, each in weights.items() if "pooler" not in key}
    save_file(left, folder / "model.safetensors", {"format": "pt"})
    TextEmbedder(folder)

    refused(r"layer=3, and the model has layers 0 .* to 2", layer=3)
    refused("layer=-4", layer=-4)
    refused("max_tokens=97, and the model has positions for 96", max_tokens=97)
    refused("max_tokens=2, and its tokenizer puts 2 around each document; use 3 or more", max_tokens=2)
    if not torch.cuda.is_available():
        refused("device=cuda: torch finds no GPU", error=UnavailableError, device="cuda")


def test_sentence_encoders_say_how_they_pool(folders: dict[str, Path], tmp_path: Path):
    """Another pooling than theirs is refused, and so is what would be left out."""
    folder = copied(folders["bert"], tmp_path / "sentences")
    (folder / "1_Pooling").mkdir()
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Normalize")]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConversionError, match="says that it was trained with first; use pooling=first"):
        TextEmbedder(folder)
    assert TextEmbedder(folder, pooling="first").pooling == "first"
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ConversionError, match="pooling_mode_max_tokens; one of"):
        TextEmbedder(folder)
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ConversionError, match=r"modules\.json: Dense stands behind the model"):
        TextEmbedder(folder, pooling="first")


def test_an_embedding_that_means_nothing_is_refused(folders: dict[str, Path]):
    """A final norm of zeros makes them 0, and 0 has no direction."""
    ours = TextEmbedder(folders["llama"])
    ours._model.norm.weight.data.zero_()
    with pytest.raises(DataError, match="an embedding that is 0 or not finite"):
        ours.embed([np.array([5, 6, 7])], batch_tokens=10)
