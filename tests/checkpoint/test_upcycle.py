"""A dense model with experts computes what it did; what cannot be is refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.format import MANIFEST, read_manifest, stored_model
from megalite.checkpoint.hf.alarms import UNTRAINED, UPCYCLED, find_alarms
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.hf.provenance import Origin, trace
from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.main import main
from megalite.config.load import dump_config
from megalite.config.schema import Config
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage, documents_of
from tests.checkpoint.hf_kit import (
    reload_here,  # noqa: F401 (a fixture)
    tiny_model,
    write_checkpoint,
)

TOLERANCE = 1e-5
"""Of logits near 1, fp32: weights that add up to 1 but for rounding."""


def run(folder: Path, *options: str) -> int:
    """The exit code of upcycling a run."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", "upcycle", str(folder / "run"), str(folder / "out"), *options])
    return int(ended.value.code or 0)


def logits_of(checkpoint: Path) -> torch.Tensor:
    reader = CheckpointReader(checkpoint)
    model = stored_model(reader.folder, reader.manifest)
    stage = Stage(StageSpec(model), reader.source("weight")).eval()
    tokens = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return stage.logits(tokens.flatten(), documents_of(tokens))


@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize("options", [["--experts", "4"], ["--experts", "3", "--top-k", "3", "--first-dense", "1"]])
def test_it_computes_what_the_dense_model_did(tmp_path, options, bias, capsys):
    """With experts in all blocks, or in some, and with biases or without."""
    dense = write_checkpoint(tmp_path / "run", tiny_model(num_kv_heads=2, bias=bias))
    assert run(tmp_path, *options) == 0
    made = tmp_path / "out" / "step-0000000"
    torch.testing.assert_close(logits_of(made), logits_of(dense), atol=TOLERANCE, rtol=TOLERANCE)
    assert "parameters, of which a token meets" in capsys.readouterr().out
    manifest = json.loads((made / MANIFEST).read_text())
    assert manifest["data"]["upcycled_from"] == str(dense)
    weights = CheckpointReader(made)
    experts = [name for name in weights.manifest.tensors if ".experts.0.up.weight" in name]
    assert len(experts) == (2 if "--first-dense" in options else 3)


REFUSALS = [
    ({}, ["--experts", "2", "--top-k", "3"], "model.moe.top_k: a token cannot go to 3 of num_experts=2"),
    ({}, ["--first-dense", "3"], "leave none of num_layers=3 blocks for experts"),
    ({}, ["--experts", "2", "--top-k", "1"], "the router learns nothing from the loss"),
    ({"moe": {"num_experts": 4}}, [], "the model has experts already"),
]


@pytest.mark.parametrize(("fields", "options", "message"), REFUSALS)
def test_what_cannot_be(tmp_path, fields, options, message, capsys):
    """Exit code 2, and nothing is there."""
    write_checkpoint(tmp_path / "run", tiny_model(**fields))
    assert run(tmp_path, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_checkpoint(tmp_path, capsys):
    """And one that is there already is not replaced unasked."""
    assert run(tmp_path) == 2
    assert "no such folder" in capsys.readouterr().err
    write_checkpoint(tmp_path / "run", tiny_model())
    assert run(tmp_path) == 0
    assert run(tmp_path) == 2
    assert "already there" in capsys.readouterr().err
    assert run(tmp_path, "--overwrite") == 0


IMPORTED = {"imported_from": "Llama-X", "license": "llama3"}
OF_IMPORT = Origin("Llama-X", "llama3")


@pytest.mark.parametrize(
    ("step", "data", "alarm", "origin"),
    [
        (7, {}, UPCYCLED, Origin("run", None)),
        (0, IMPORTED, UPCYCLED, OF_IMPORT),
        (7, IMPORTED, UPCYCLED, OF_IMPORT),
        (0, {}, UNTRAINED, Origin("run", None)),
    ],
)
def test_what_it_was_is_remembered(tmp_path, step, data, alarm, origin):
    """Copies of trained weights are not random ones; where these came from, and their licence, is said of what is
    trained from them, too, and which tokenizer belongs to them."""
    data = {**data, "tokenizer_fingerprint": "of words"}
    write_checkpoint(tmp_path / "run", tiny_model(), step=step, data=data)
    assert run(tmp_path) == 0
    made = tmp_path / "out" / "step-0000000"
    manifest = read_manifest(made)
    assert find_alarms(manifest, stored_model(made, manifest), trace(made, manifest)) == [alarm]
    manifest.data.pop("updates_before")  # as of an earlier version, which did not say
    assert find_alarms(manifest, stored_model(made, manifest), trace(made, manifest)) == [UPCYCLED]
    assert trace(made, manifest).origin == origin
    assert trace(made, manifest).tokenizers == {"of words"}

    more = write_checkpoint(tmp_path / "more", tiny_model(), step=9)
    settings = {"train": {"steps": 9, "init_from": tmp_path / "out"}}
    (more / "config.yaml").write_text(dump_config(Config.model_validate(settings)))
    found = trace(more, read_manifest(more))
    assert found.origin == origin
    assert find_alarms(read_manifest(more), tiny_model(), found) == []


def test_a_run_that_began_with_an_import(tmp_path):
    """Its own manifest does not name that; what is upcycled from it does."""
    write_checkpoint(tmp_path / "base", tiny_model(), step=0, data=IMPORTED)
    dense = write_checkpoint(tmp_path / "run", tiny_model(), step=9)
    settings = {"train": {"steps": 9, "init_from": tmp_path / "base"}}
    (dense / "config.yaml").write_text(dump_config(Config.model_validate(settings)))
    assert run(tmp_path) == 0
    made = tmp_path / "out" / "step-0000000"
    assert trace(made, read_manifest(made)).origin == OF_IMPORT


@pytest.mark.usefixtures("reload_here")
def test_the_card_says_so(tmp_path):
    write_checkpoint(tmp_path / "run", tiny_model(num_kv_heads=2), step=0, data=IMPORTED)
    assert run(tmp_path, "--experts", "3") == 0
    assert to_hugging_face(tmp_path / "out", tmp_path / "hf").alarms == (UPCYCLED,)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"> **{UPCYCLED}**" in card
    assert "| began as | Llama-X, licence llama3 |" in card.splitlines()
