"""`configs/watched.yaml`, made small: everything that watches a run is on at once, and leaves its traces."""

from __future__ import annotations

import json
import math

from megalite.config.load import load_config
from megalite.errors import EXIT_DONE
from tests.kit.paths import ROOT
from tests.kit.runs import events, metrics
from tests.train.evaluation.conftest import SEQ_LEN, write_questions
from tests.train.forked import launch

STEPS = 12


def test_everything_watches_at_once(prepared, tmp_path):
    """Two sources in two stages, two validation sets, questions, looks into the layers, spikes, copies, noise."""
    packed, questions = prepared / "out/packed", write_questions(tmp_path / "qa.jsonl", 8)
    config = load_config(
        ROOT / "configs/watched.yaml",
        [
            f"run.dir={tmp_path / 'run'}",
            f"data.train=[{{path: {packed / 'train'}, name: web}}, {{path: {packed / 'valid'}, name: books}}]",
            "data.mix={stages: [{share: 0.5, weights: {web: 1}}, {weights: {web: 1, books: 1}}]}",
            f"data.valid=[{{path: {packed / 'valid'}, name: unseen}}, {{path: {packed / 'train'}, name: seen}}]",
            f"train.tasks=[{{path: {questions}}}]",
            f"train.steps={STEPS}",
            "train.eval_every=4",
            "train.eval_batches=1",
            "train.device=cpu",
            "train.compile=off",
            "batch.micro_batch_size=1",
            "batch.global_batch_size=4",
            f"batch.seq_len={SEQ_LEN}",
            "batch.noise_scale.every=3",
            "model.hidden_size=32",
            "model.num_layers=2",
            "model.ffn_hidden_size=64",
            "schedule.warmup_steps=2",
            "schedule.decay_steps=4",
            "checkpoint.every=4",
            "health.check_replicas_every=2",
            "monitor.layers_every=5",
            "monitor.tensorboard=false",
        ],
    )
    assert launch(config, 2) == EXIT_DONE
    steps = metrics(config.run.dir)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert all(math.isfinite(record["loss"]) and not record["skipped"] for record in steps)
    validations = [event for event in events(config.run.dir) if event["event"] == "validation"]
    assert [event["step"] for event in validations] == [4, 8, 12]
    for event in validations:
        assert set(event["sets"]) == {"unseen", "seen"}
        assert event["tasks"]["qa"]["num"] == 8
        assert event["loss"] == event["sets"]["unseen"]["loss"]
    (done,) = (event for event in events(config.run.dir) if event["event"] == "done")
    consumed = {name: each["samples"] for name, each in done["consumed"].items()}
    assert consumed == {"web": 36, "books": 12}  # the second stage reads both alike
    looks = [json.loads(line) for line in (config.run.dir / "layers.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [5, 10]
    assert {"critical_batch_size", "noise_scale"} & set(steps[-1]), steps[-1]
    assert not [event for event in events(config.run.dir) if event["event"] in ("spike", "drift", "nonfinite")]
