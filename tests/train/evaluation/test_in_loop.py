"""Validations within whole runs: sets by name, tasks, early stopping, the best checkpoint, alarms, restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.checkpoint import catalog
from megalite.checkpoint.format import read_manifest, write_manifest
from megalite.checkpoint.listing import list_checkpoints
from megalite.config.load import load_config
from megalite.config.schema import SourceConfig
from megalite.data.samples import open_validation_samples, open_validation_sets
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, UserError
from megalite.report.run_data import read_runs
from megalite.report.sections import status
from megalite.sweeps.outcome import read_outcome
from megalite.train.evaluation.offline import open_model, score_tasks
from megalite.train.preflight import preflight
from tests.kit.data import random_documents, write_packed_folder
from tests.kit.runs import events, write_run
from tests.train.evaluation.conftest import SEQ_LEN, write_questions
from tests.train.forked import launch

TOLERANCE = 1e-5
"""Relative, of a loss in fp32 summed in another order."""


def config_in(folder: Path, **sections):
    """A tiny run of two dp ranks."""
    return load_config(write_run(folder, **{"parallel": {"tp": 1, "dp": 2, "zero_stage": 1}, **sections}))


def validations(run_dir: Path) -> list[dict]:
    return [event for event in events(run_dir) if event["event"] == "validation"]


def test_each_set_by_its_name(tmp_path):
    """Every set has its own loss and perplexity; what is watched is their mean over tokens, or the set that is named;
    sources that share a name are one set."""
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        write_packed_folder(tmp_path / name, random_documents(100, longest=30, seed=seed), seq_len=32)
    valid = [
        {"path": str(tmp_path / "a"), "name": "prose"},
        {"path": str(tmp_path / "b"), "name": "code"},
        {"path": str(tmp_path / "c"), "name": "prose"},
    ]
    found = {}
    for watch in (None, "code"):
        config = config_in(
            tmp_path / str(watch), data={"valid": valid}, train={"steps": 2, "eval_batches": 3, "watch": watch}
        )
        assert launch(config, 2) == EXIT_DONE
        (event,) = validations(config.run.dir)
        sets = event["sets"]
        assert list(sets) == ["prose", "code"]
        for each in (event, *sets.values()):
            assert each["perplexity"] == pytest.approx(torch.tensor(each["loss"]).double().exp().item())
        found[watch] = event
    assert found[None]["sets"] == found["code"]["sets"]
    sets = found[None]["sets"].values()
    mean = sum(each["loss"] * each["num_tokens"] for each in sets) / sum(each["num_tokens"] for each in sets)
    assert found[None]["loss"] == pytest.approx(mean, rel=TOLERANCE)
    assert found["code"]["loss"] == found["code"]["sets"]["code"]["loss"]


def test_each_sample_counts_once(tmp_path):
    """Of a set that is no multiple of a global batch, or smaller than one: all of its labels, and each once, as
    `megalite eval --loss` counts them."""
    found = []
    for name, number in (("few", 20), ("more", 120)):
        write_packed_folder(tmp_path / name, random_documents(number, longest=30, seed=1), seq_len=32)
        samples = open_validation_samples([SourceConfig(path=tmp_path / name)], seq_len=32, document_masks=True)
        rows = [samples.sample(index) for index in range(samples.num_samples_per_epoch)]
        found.append((len(rows), sum(int(row.loss_mask.sum()) for row in rows)))
    (few, _), (more, _) = found
    assert few < 16 < more
    assert more % 16
    valid = [{"path": str(tmp_path / name), "name": name} for name in ("few", "more")]
    batch = {"global_batch_size": 16, "micro_batch_size": 4, "seq_len": 32}
    config = config_in(
        tmp_path / "run", data={"valid": valid}, batch=batch, train={"steps": 2, "eval_batches": 99, "device": "cpu"}
    )
    assert launch(config, 2) == EXIT_DONE
    (event,) = validations(config.run.dir)
    assert [each["num_tokens"] for each in event["sets"].values()] == [labels for _, labels in found]


def test_sets_are_read_as_they_are_named(tmp_path):
    """The samples of a set are those of its own sources, in their order; unnamed ones never share a name."""
    for name, seed in (("x/valid", 1), ("y/valid", 2), ("z", 3)):
        write_packed_folder(tmp_path / name, random_documents(50, seed=seed), seq_len=32)
    sources = [
        SourceConfig(path=tmp_path / "x/valid"),
        SourceConfig(path=tmp_path / "z", name="mine"),
        SourceConfig(path=tmp_path / "y/valid"),
    ]
    sets = open_validation_sets(sources, seq_len=32, document_masks=True)
    assert list(sets) == ["valid", "mine", "valid-2"]
    assert [each.sources[0].tokens.prefix.parent.name for each in sets.values()] == [
        "valid-tokens",
        "z-tokens",
        "valid-tokens",
    ]
    assert sets["valid"].fingerprint != sets["valid-2"].fingerprint


def test_early_stop_is_remembered(tmp_path):
    """A loss that cannot fall by min_delta ends the run with exit 0 after `patience` validations, saved and with a
    reason; a restart in between waits no longer than a run without one; the same command again stays ended."""
    train = {"steps": 40, "eval_every": 2, "eval_batches": 1, "early_stopping": {"patience": 3, "min_delta": 5.0}}
    whole = config_in(tmp_path / "whole", train=train)
    assert launch(whole, 2) == EXIT_DONE
    assert validations(whole.run.dir)[-1]["step"] == 8  # 2 sets the mark, 4, 6 and 8 are no progress
    stop = [event for event in events(whole.run.dir) if event["event"] == "early_stop"]
    assert [event["step"] for event in stop] == [8]
    assert "in 3 validations" in stop[0]["why"]
    assert events(whole.run.dir)[-1]["event"] == "done"
    assert catalog.step_of(catalog.latest(whole.run.dir)) == 8

    cut = config_in(tmp_path / "cut", train=train)
    assert launch(cut, 2, stop_after=5) == EXIT_REQUEUE
    assert launch(cut, 2) == EXIT_DONE
    assert validations(cut.run.dir)[-1]["step"] == 8
    num_events = len(events(cut.run.dir))
    assert launch(cut, 2) == EXIT_DONE
    assert [event["event"] for event in events(cut.run.dir)[num_events:]] == ["start", "early_stop", "done"]
    assert status(read_runs([cut.run.dir])[0], 0.0)[0] == "stopped early at step 8 of 40"
    assert read_outcome(cut.run.dir, "validation", code=0).state == "done"


def test_best_is_a_link(tmp_path):
    """`best` points at the checkpoint with the lowest loss, and the list says so; when retention takes it away, at the
    best of those left."""
    train = {"steps": 6, "eval_every": 1, "eval_batches": 2}
    config = config_in(tmp_path, train=train, checkpoint={"every": 1, "keep_last": 3})
    assert launch(config, 2) == EXIT_DONE
    rows = list_checkpoints(config.run.dir).checkpoints
    want = min(rows, key=lambda row: (row.validation_loss, -row.step))  # the last rate is 0: two may be equal
    assert [row.is_best for row in rows] == [row is want for row in rows]
    link = config.run.dir / "best"
    assert link.is_symlink()
    assert read_manifest(link).progress.step == want.step
    standing = read_manifest(rows[-1].folder).progress.components["validation"]
    assert standing["best_loss"] == min(event["loss"] for event in validations(config.run.dir))


def test_tasks_in_the_loop(tmp_path, prepared):
    """A run's own scores on tp x pp are those of its checkpoint in one process; a planted best makes the alarm ring."""
    questions = write_questions(tmp_path / "qa.jsonl", 30)
    packed = {"train": [{"path": str(prepared / "out/packed/train")}]}
    config = config_in(
        tmp_path,
        parallel={"tp": 2, "pp": 2, "zero_stage": 1},
        model={"vocab_size": 300},
        batch={"seq_len": SEQ_LEN},
        data={**packed, "valid": []},
        train={
            "steps": 4,
            "eval_every": 2,
            "tasks": [
                {"path": str(questions), "alarm_drop": 0.01},
                {"path": str(questions), "name": "ten", "limit": 10},
            ],
        },
    )
    assert launch(config, 4, stop_after=2) == EXIT_REQUEUE
    checkpoint = catalog.latest(config.run.dir)
    (event,) = validations(config.run.dir)
    assert "loss" not in event
    assert event["tasks"]["ten"]["num"] == 10
    ((_, found),) = score_tasks(open_model(checkpoint, prepared / "out/tokenizer"), config.train.tasks[:1])
    assert event["tasks"]["qa"] == found.record()
    assert read_manifest(checkpoint).progress.components["validation"]["best_scores"]["qa"] == found.accuracy

    plant_best(checkpoint, 1.0)
    assert launch(config, 4) == EXIT_DONE
    (alarm,) = [event for event in events(config.run.dir) if event["event"] == "score_alarm"]
    assert (alarm["task"], alarm["best"], alarm["step"]) == ("qa", 1.0, 4)
    assert "below its best, 1.0000" in alarm["why"]


def plant_best(checkpoint: Path, accuracy: float) -> None:
    """Make a checkpoint remember a higher accuracy than there was."""
    manifest = read_manifest(checkpoint)
    components = manifest.progress.components
    validation = {**components["validation"], "best_scores": {"qa": accuracy}}
    manifest.progress = replace(manifest.progress, components={**components, "validation": validation})
    write_manifest(checkpoint, manifest)


def test_bad_tasks_are_told_before_ranks_start(tmp_path, prepared):
    """Files that are not questions, all at once, and data that names no tokenizer."""
    (tmp_path / "bad.jsonl").write_text(json.dumps({"question": "?"}) + "\n")
    tasks = {"steps": 2, "tasks": [{"path": str(tmp_path / "bad.jsonl")}]}
    data = {"train": [{"path": str(prepared / "out/packed/train")}], "valid": []}
    config = config_in(tmp_path, model={"vocab_size": 300}, batch={"seq_len": SEQ_LEN}, data=data, train=tasks)
    with pytest.raises(UserError, match=r"bad\.jsonl:1: unknown key 'question'"):
        preflight(config, 2)
