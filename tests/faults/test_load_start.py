"""Starting a run whose newest checkpoint is damaged: every kind of damage is named, and the last whole one is taken."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint.compare import compare
from megalite.checkpoint.format import MANIFEST, folder_name, read_manifest
from megalite.config.load import load_config
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.train.preflight import preflight_stages
from megalite.train.start import choose_start
from tests.faults.test_load_damage import DAMAGES
from tests.kit.runs import events, megalite, write_run
from tests.kit.spawn import run_ranks

STILL = {"lr": 1e-30, "weight_decay": 0.0}
"""A learning rate that changes no weight: to a checkpoint they are frozen, while the moments move."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A run on two ranks with differential checkpoints at steps 2, 4, 6 and 8, the last two sharing files with 4."""
    folder = tmp_path_factory.mktemp("differential")
    checkpoint = {"every": 2, "keep_last": 9, "differential": True}
    done = megalite("train", write_run(folder, checkpoint=checkpoint, optimizer=STILL, train={"steps": 8}))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def copy_with_links(run: Path, target: Path) -> Path:
    """A run's folder whose checkpoints share files as the original's do."""
    seen: dict[int, Path] = {}
    for path in sorted(run.rglob("*")):
        copy = target / path.relative_to(run)
        if path.is_dir():
            copy.mkdir(parents=True)
            continue
        first = seen.setdefault(path.stat().st_ino, copy)
        shutil.copyfile(path, copy) if first == copy else os.link(first, copy)
    return target


def starts(config_path: Path, run_dirs: list[Path]) -> list[tuple[str, int, tuple[str, ...]]]:
    """Where two ranks would start in each of some run folders, and what they would say is damaged."""
    found = []
    for run_dir in run_dirs:
        config = load_config(config_path, [f"run.dir={run_dir}", "train.steps=9"])
        stages, _ = preflight_stages(config, dist.get_world_size())
        plan = stages[0].plan
        axes = connect(Mesh(plan.pp, plan.dp, plan.cp, plan.tp), dist.get_rank())
        start = choose_start(config, stages, axes, torch.device("cpu"))
        found.append((start.origin, start.progress.step, start.damaged))
    return found


def test_differential_checkpoints_are_written_by_a_run(undisturbed):
    """With weights that stand still, the second checkpoint puts them apart and later ones link them."""
    names = {
        step: read_manifest(undisturbed / "run" / "checkpoints" / folder_name(step)).files for step in (2, 4, 6, 8)
    }
    assert [any(name.startswith("from-") for name in names[step]) for step in names] == [False, False, True, True]
    assert [any("-still" in name for name in names[step]) for step in names] == [False, True, True, True]
    assert "from-0000004.rank-00000-still.safetensors" in names[8]
    saves = [event for event in events(undisturbed / "run") if event["event"] == "save"]
    assert [event.get("note", "") for event in saves] == [
        "there is no older checkpoint",
        "what is unchanged was put apart, to be linked from now on",
        "",
        "",
    ]
    assert [event["bytes_linked"] > 0 for event in saves] == [False, False, True, True]
    shared = list((undisturbed / "run" / "checkpoints" / "step-0000008").glob("from-0000004.*still*"))
    assert {path.stat().st_nlink for path in shared} == {3}


def test_the_last_whole_one_is_taken(undisturbed, tmp_path):
    """Every damage to a rank's file, the config and the manifest of step 8: two ranks agree to start from step 6, and
    each tells which file is wrong. A damaged shared file takes 4, 6 and 8 with it: they start from 2."""
    run_dirs, expected = [], []
    for kind, damage in DAMAGES.items():
        for name in ("rank-00001.safetensors", "config.yaml", MANIFEST):
            run = copy_with_links(undisturbed / "run", tmp_path / f"{len(run_dirs)}")
            damage(run / "checkpoints" / "step-0000008" / name)
            run_dirs.append(run)
            expected.append((6, name, 1, kind))
    run = copy_with_links(undisturbed / "run", tmp_path / "shared")
    shared = next((run / "checkpoints" / "step-0000008").glob("from-*"))
    with open(shared, "r+b") as file:  # in place: the file behind all links
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    run_dirs.append(run)
    expected.append((2, shared.name, 3, "shared"))
    for found in run_ranks(starts, 2, undisturbed / "config.yaml", run_dirs):
        for (origin, step, damaged), (want, name, count, kind) in zip(found, expected, strict=True):
            assert step == want, (name, kind)
            assert f"step-{want:07d}" in origin
            assert len(damaged) == count, (name, kind, damaged)
            assert name in damaged[0], (name, kind, damaged)


def test_a_run_goes_on_past_the_damage_and_says_so(undisturbed, tmp_path):
    """The whole command: a lost manifest is told on the screen and in events.jsonl, and training goes on from step 6 to
    the same state, differential checkpoints included, that the undisturbed run has at step 8."""
    run = copy_with_links(undisturbed / "run", tmp_path / "run")
    (run / "checkpoints" / "step-0000008" / MANIFEST).unlink()
    done = megalite("train", undisturbed / "config.yaml", f"run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step-0000008" in done.stdout
    assert MANIFEST in done.stdout
    assert "step 6 of 8" in done.stdout
    assert "damaged_checkpoint" in [event["event"] for event in events(run)]
    last = "checkpoints/step-0000008"
    assert compare(undisturbed / "run" / last, run / last).is_same_state
    assert list((run / last).glob("from-0000004.*"))


@pytest.mark.parametrize("setting", ["checkpoint.differential=false", "checkpoint.compress=true"])
def test_how_it_is_stored_changes_nothing(undisturbed, tmp_path, setting):
    """One setting turns differential off, another packs the numbers; the state at step 8 is the same bit for bit."""
    done = megalite("train", undisturbed / "config.yaml", f"run.dir={tmp_path / 'run'}", setting)
    assert done.returncode == 0, done.stdout + done.stderr
    last = tmp_path / "run" / "checkpoints" / "step-0000008"
    assert bool(list(last.glob("from-*"))) == ("compress" in setting)
    assert bool(list(last.glob("*.zst"))) == ("compress" in setting)
    assert compare(undisturbed / "run" / "checkpoints" / "step-0000008", last).is_same_state


def test_init_from_a_damaged_and_a_merged_one(undisturbed, tmp_path):
    """Weights of another run are checked before a new one starts from them; merged, in bf16 and without moments, they
    are something to start from."""
    run = copy_with_links(undisturbed / "run", tmp_path / "old")
    victim = run / "checkpoints" / "step-0000008" / "rank-00000.safetensors"
    DAMAGES["middle byte flipped"](victim)
    done = megalite(
        "train", undisturbed / "config.yaml", f"run.dir={tmp_path / 'new'}", f"train.init_from={victim.parent}"
    )
    assert done.returncode == 2
    assert victim.name in done.stderr
    assert "Traceback" not in done.stderr.split("megalite: ")[-1]
    good = undisturbed / "run" / "checkpoints" / "step-0000008"
    done = megalite("checkpoint", "merge", good, tmp_path / "merged", "--weights-only", "--bf16")
    assert done.returncode == 0, done.stderr
    settings = (f"run.dir={tmp_path / 'new'}", f"train.init_from={tmp_path / 'merged'}", "train.steps=2")
    done = megalite("train", undisturbed / "config.yaml", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights of" in done.stdout
