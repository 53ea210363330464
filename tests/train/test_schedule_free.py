"""Whole runs whose model is an average: what a run validates is what everybody reads of its checkpoints, and what it
goes on from is what it trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalite.architecture.weights import Rectangle, weight_table
from megalite.checkpoint.format import folder_name, stored_model
from megalite.checkpoint.hf.exporter import to_hugging_face
from megalite.checkpoint.merge import merge
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.load import load_config
from megalite.data.loader import make_batch
from megalite.data.samples import open_validation_samples
from megalite.errors import EXIT_DONE, ConfigError
from megalite.studies.verify_resume import verify_resume
from megalite.train.evaluation.offline import build_stage, open_model, token_losses
from tests.kit.runs import events, metrics, write_run
from tests.train.forked import launch

STEPS, BETA = 8, 0.9
ROUNDING = 2e-6
"""Relative, of a loss: fp32 sums in another order."""

SECTIONS: dict[str, dict[str, Any]] = {
    "parallel": {"tp": 1, "dp": 2, "zero_stage": 1},
    "optimizer": {"name": "schedule_free_adamw", "lr": 1e-2, "betas": [BETA, 0.99]},
    "schedule": {"name": "constant", "warmup_steps": 3},
    "train": {"steps": STEPS, "eval_batches": 2, "eval_every": 4},
    "checkpoint": {"every": 4},
}
NO_LR = "optimizer.lr=1e-30"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a run that has ended."""
    folder = tmp_path_factory.mktemp("averaged")
    assert launch(load_config(write_run(folder, **SECTIONS)), 2) == EXIT_DONE
    return folder


def checkpoint(folder: Path) -> Path:
    return folder / "run/checkpoints" / folder_name(STEPS)


def validation(run: Path) -> float:
    """The last that a run has found."""
    return [event["loss"] for event in events(run) if event["event"] == "validation"][-1]


def loss_of(model: Path, packed: Path) -> float:
    """Of a saved model on what a run validates on, as `megalite eval` computes it."""
    samples = open_validation_samples([load_source(packed)], seq_len=32, document_masks=True)
    batch = make_batch(samples, 0, 8)
    losses = token_losses(build_stage(open_model(model, Path("none")), torch.device("cpu")), batch).double()
    return float(losses[batch.loss_mask].mean())


def load_source(packed: Path) -> Any:
    return load_config(packed.parent / "config.yaml").data.valid[0]


def averages(folder: Path) -> dict[str, torch.Tensor]:
    """x = y - (1 - beta) (z - x), of what a checkpoint holds."""
    reader = CheckpointReader(folder)
    found = {}
    for name, weight in weight_table(stored_model(reader.folder, reader.manifest)).items():
        whole = Rectangle((0,) * len(weight.shape), weight.shape)
        y, lead = (reader.read(f"{kind}/{name}", whole) for kind in ("weight", "z_minus_x"))
        found[name] = y - (1.0 - BETA) * lead
    return found


def test_everybody_reads_the_average(folder, tmp_path):
    """The last validation, `eval` of the checkpoint, its export and its weights alone agree; what is trained is another
    model."""
    packed, model = folder / "packed", checkpoint(folder)
    found = validation(folder / "run")
    assert loss_of(model, packed) == pytest.approx(found, rel=ROUNDING)
    exported = to_hugging_face(model, tmp_path / "hf", tokenizer="none").folder
    assert loss_of(exported, packed) == pytest.approx(found, rel=ROUNDING)
    merged = merge(model, tmp_path / "merged", weights_only=True).folder
    assert loss_of(merged, packed) == pytest.approx(found, rel=ROUNDING)
    x, written = averages(model), load_file(exported / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        ours = {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "final_norm.weight"}[name]
        torch.testing.assert_close(written[name], x[ours], rtol=1e-6, atol=1e-8)
    y = CheckpointReader(model)
    far = [float((x[name] - next(iter(y.slabs(f"weight/{name}")))).abs().max()) for name in x]
    assert min(far) > 1e-4


def test_others_begin_with_the_average(folder):
    """A run that begins with the weights, and a branch with another optimizer, validate as the run did: their first
    update is none."""
    found, model = validation(folder / "run"), checkpoint(folder)
    origins = {"init": (f"train.init_from={model}", "train.steps=1", "schedule.warmup_steps=0")}
    origins["branch"] = (f"train.branch_from={model}", f"train.steps={STEPS + 1}", "optimizer.name=adamw")
    for name, overrides in origins.items():
        run = folder / name
        config = load_config(folder / "config.yaml", [f"run.dir={run}", NO_LR, *overrides])
        assert launch(config, 2) == EXIT_DONE
        assert validation(run) == pytest.approx(found, rel=ROUNDING), name


def test_a_restart_goes_on_bit_by_bit(tmp_path):
    """Losses, weights, state and what the averages remember, of a run in two halves, the first in mid-warmup."""
    own = {**SECTIONS, "schedule": {"name": "constant", "warmup_steps": 5}}
    report = verify_resume(write_run(tmp_path, **own), (), STEPS // 2, tmp_path / "twice", launch=launch)
    assert report.is_equal, report.verdict
    last = CheckpointReader(tmp_path / "twice/halves/checkpoints" / folder_name(STEPS)).manifest.progress
    rates = [record["lr"] for record in metrics(tmp_path / "twice/halves")]
    largest, total, share = last.components["adaptive_control"]["averaging"]["run"]
    assert (largest, share) == (max(rates), largest**2 / total)
    assert total == pytest.approx(sum(rate**2 for rate in rates), rel=1e-12)


def test_what_would_change_the_average_is_refused(folder):
    """The share of x in y is a setting of the run."""
    with pytest.raises(ConfigError) as error:
        launch(load_config(folder / "config.yaml", ["optimizer.betas=[0.8, 0.99]", "train.steps=12"]), 2)
    assert any("optimizer.betas: 0.9 in" in problem for problem in error.value.problems)
