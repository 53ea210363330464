"""Layers that predict further, on their way to transformers and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.importer import HuggingFaceWeights
from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
from megalite.checkpoint.reader import CheckpointReader
from megalite.errors import ConversionError
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage, documents_of
from tests.checkpoint.hf_kit import (
    DEEPSEEK_V3,
    RandomWeights,
    assert_same_weights,
    reload_here,  # noqa: F401
    tiny_model,
    write_checkpoint,
)

pytestmark = pytest.mark.usefixtures("reload_here")

DEPTH = 61
"""By their place behind so many blocks transformers tells them from others, in a model of any size."""

FURTHER = {**DEEPSEEK_V3, "mtp": {"num_layers": 1}}
LONG = {**FURTHER, "num_layers": DEPTH, "hidden_size": 16, "ffn_hidden_size": 16, "num_heads": 2}
TOKENS = torch.tensor([[5, 17, 3, 99, 42, 8, 61, 20]])


def export(folder: Path, fields: dict) -> Path:
    write_checkpoint(folder / "run", tiny_model(**fields))
    to_hugging_face(folder / "run", folder / "hf")
    return folder / "hf"


def own_logits(fields: dict) -> torch.Tensor:
    """Of the token behind the next one, for every token but the last: `[t - 1, v]`."""
    model = tiny_model(**fields)
    stage = Stage(StageSpec(model), RandomWeights()).eval()
    length = TOKENS.shape[1] - 1
    documents = documents_of(TOKENS[:, :-1])
    stream = stage(TOKENS[0, :-1], documents)
    embedded = stage.embedding(TOKENS[0, 1:], documents)
    further = stage.mtp["0"](stream, embedded, documents, stage.run_block)
    return stage.head.logits(further).view(length, -1)


@torch.no_grad()
def test_transformers_predicts_the_same(tmp_path: Path):
    """Its own layers of multi-token prediction, loaded by itself, put out the same logits; and what it drafts with them
    is what it writes without, as the next token always is the model's own."""
    from transformers.modeling_layers import MtpModel

    theirs = transformers.AutoModelForCausalLM.from_pretrained(export(tmp_path, LONG), dtype=torch.float32).eval()
    mtp = MtpModel.from_pretrained(theirs).eval()
    stream = theirs.model(TOKENS[:, :-1]).last_hidden_state
    positions = torch.arange(TOKENS.shape[1] - 1).unsqueeze(0)
    further = mtp.forward_layer(0, stream, positions, None, input_ids=TOKENS[:, 1:])
    ours = own_logits(LONG)
    assert float((theirs.lm_head(further)[0] - ours).abs().max()) < 1e-5
    assert ours.std() > 0.1
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(theirs.generate(TOKENS, use_mtp=True, **options), theirs.generate(TOKENS, **options))


def test_left_out(tmp_path: Path):
    """A folder with them gives a model without them its weights."""
    model = tiny_model(**DEEPSEEK_V3)
    whole = HuggingFaceWeights(export(tmp_path, FURTHER), model)
    assert_same_weights(whole, RandomWeights(), model)


def test_counted_but_not_there(tmp_path: Path):
    """transformers 5 counts one in every config of the class, whether or not its weights are there."""
    folder = export(tmp_path, DEEPSEEK_V3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert HuggingFaceWeights(folder).model.mtp is None
    from_hugging_face(folder, tmp_path / "back")


def test_published_folders_repeat_tables(tmp_path: Path):
    """DeepSeek-V3's has embedding and head a second time behind its last block: equal ones are read, others refused."""
    folder, model = export(tmp_path, FURTHER), tiny_model(**FURTHER)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    done = from_hugging_face(folder, tmp_path / "back")
    assert_same_weights(CheckpointReader(done.checkpoint).source("weight"), RandomWeights(), model)
    tensors["model.layers.3.shared_head.head.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"shared_head.head.weight differs from lm_head.weight"):
        HuggingFaceWeights(folder)


def test_a_class_without_them(tmp_path: Path):
    """They stay behind, and that is said, where no class of transformers has the model with them."""
    write_checkpoint(tmp_path / "run", tiny_model(mtp={"num_layers": 1}))
    done = to_hugging_face(tmp_path / "run", tmp_path / "hf")
    assert done.architecture == "LlamaForCausalLM"
    assert "LlamaForCausalLM has no layers that predict further: those of model.mtp stay behind" in done.notes
