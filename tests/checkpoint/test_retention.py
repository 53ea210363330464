"""Which checkpoints stay, and that none goes while nothing else is known to be good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.checkpoint import catalog
from megalite.checkpoint.format import Manifest, Progress, hash_file, read_manifest, write_manifest
from megalite.checkpoint.retention import Keep, Pruned, point_at_best, prune
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import CheckpointError, ConfigError

STEPS = (10, 20, 30, 40, 50)


def make(root: Path, step: int, loss: float | None = None) -> Path:
    """A checkpoint of one file, with or without a validation loss."""
    folder = root / f"step-{step:07d}"
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(f"weights of step {step}".encode())
    if loss is not None:
        (folder / catalog.VALIDATION).write_text(json.dumps({"loss": loss}))
    files = {path.name: hash_file(path) for path in folder.iterdir()}
    write_manifest(folder, Manifest(Progress(step=step), {}, {}, {}, files))
    return folder


def cut(folder: Path) -> None:
    """Damage that shows without reading."""
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    """Damage that only the checksum shows."""
    path = folder / "rank-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def steps(root: Path) -> list[int]:
    return [catalog.step_of(path) for path in catalog.complete(root)]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(2), [40, 50]),
        (Keep(1, every=20), [20, 40, 50]),
        (Keep(3, every=25), [30, 40, 50]),
        (Keep(9), [10, 20, 30, 40, 50]),
        (Keep(1, best=1), [20, 50]),
        (Keep(1, best=2), [20, 40, 50]),
        (Keep(1, best=9), [20, 30, 40, 50]),
        (Keep(2, every=30, best=1), [20, 30, 40, 50]),
        (Keep(1, steps=frozenset({10, 25})), [10, 50]),
    ],
)
def test_what_is_kept(tmp_path, keep, kept):
    """The newest, the multiples, the best; a checkpoint without a validation loss does not compete."""
    losses = {20: 1.5, 30: 1.9, 40: 1.7, 50: float("nan")}
    for step in STEPS:
        make(tmp_path, step, losses.get(step))
    pruned = prune(tmp_path, keep, tmp_path / "step-0000050")
    assert steps(tmp_path) == kept
    assert [catalog.step_of(path) for path in pruned.removed] == [step for step in STEPS if step not in kept]


def test_of_equal_losses_the_newest_is_best(tmp_path):
    """A run that stands still keeps the later one."""
    for step in STEPS:
        make(tmp_path, step, 2.0)
    prune(tmp_path, Keep(1, best=2), tmp_path / "step-0000050")
    assert steps(tmp_path) == [40, 50]


def test_best_points_at_what_is_there(tmp_path):
    """And is gone when the last validated checkpoint is."""
    root = tmp_path / "checkpoints"
    make(root, 10, 2.0)
    make(root, 20, 1.0)
    make(root, 30)
    assert point_at_best(root) == root / "step-0000020" == (tmp_path / "best").resolve()
    catalog.remove(root / "step-0000020")
    assert point_at_best(root) == root / "step-0000010" == (tmp_path / "best").resolve()
    catalog.remove(root / "step-0000010")
    assert point_at_best(root) is None
    assert not (tmp_path / "best").is_symlink()


def test_damaged_ones_do_not_count(tmp_path):
    """Two are to be kept, and the second newest is cut short: it is set aside, and the third stays."""
    for step in STEPS:
        make(tmp_path, step)
    for step in (10, 40):
        cut(tmp_path / f"step-{step:07d}")
    pruned = prune(tmp_path, Keep(2), tmp_path / "step-0000050")
    assert steps(tmp_path) == [30, 50]
    assert pruned.set_aside == (tmp_path / "damaged-step-0000040",)
    assert [path.name for path in pruned.removed] == ["step-0000010", "step-0000020"]


def test_of_damaged_ones_the_newest_stay(tmp_path):
    """What is set aside is bounded; one that is damaged again takes its own former place."""
    for step in (*STEPS, 50):
        catalog.set_aside(make(tmp_path, step))
    assert [path.name for path in catalog.damaged(tmp_path)] == ["damaged-step-0000040", "damaged-step-0000050"]
    assert catalog.named(tmp_path) == []


def test_a_folder_of_another_step(tmp_path):
    """A checkpoint under another step's name is damaged: what goes by the name would go on from the wrong step."""
    make(tmp_path, 40).rename(tmp_path / "step-0000013")
    with pytest.raises(CheckpointError, match=r"holds step 40, though its name says 13.*step-0000040"):
        read_manifest(tmp_path / "step-0000013")
    assert catalog.latest(tmp_path) is None
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-0000060").symlink_to(make(tmp_path / "elsewhere", 40))
    assert catalog.latest(tmp_path) is None, "a link's own name counts, where it has a step"
    (tmp_path / "best").symlink_to(tmp_path / "elsewhere" / "step-0000040")
    assert catalog.step_of(tmp_path / "best") == 40
    make(tmp_path, 10)
    assert catalog.latest(tmp_path) == tmp_path / "step-0000010"


@pytest.mark.parametrize("name", [13, 60])
def test_one_with_another_steps_name_is_let_be(name, tmp_path):
    """All that is wrong with it is its name, so it is neither removed nor counted."""
    for step in STEPS:
        make(tmp_path, step)
    (tmp_path / "step-0000040").rename(tmp_path / f"step-{name:07d}")
    pruned = prune(tmp_path, Keep(2), tmp_path / "step-0000050")
    assert steps(tmp_path) == sorted([30, 50, name])
    assert pruned.set_aside == ()


@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("damage", [cut, flip])
@pytest.mark.parametrize("good", STEPS)
def test_the_only_good_one_stays(tmp_path, good, damage, keep_last):
    """Whichever of five it is, and whatever is wrong with the others."""
    for step in STEPS:
        make(tmp_path, step)
        if step != good:
            damage(tmp_path / f"step-{step:07d}")
    prune(tmp_path, Keep(keep_last))
    assert good in steps(tmp_path)


@pytest.mark.parametrize("damage", [cut, flip])
def test_nothing_goes_when_nothing_is_good(tmp_path, damage):
    """Five damaged checkpoints are still evidence, and perhaps half of one can be saved."""
    for step in STEPS:
        damage(make(tmp_path, step))
    assert prune(tmp_path, Keep(1)) == Pruned()
    assert steps(tmp_path) == list(STEPS)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"keep_best": 2}, "checkpoint.keep_best: 2 has no effect without every and train.eval_every; set both too"),
        ({"keep_best": 2, "every": 5}, "checkpoint.keep_best: 2 has no effect without train.eval_every; set it too"),
        ({"asynchronous": False, "if_busy": "skip"}, "checkpoint.if_busy: found skip, but it has no effect with"),
    ],
)
def test_settings_without_effect_are_refused(settings, complaint):
    """Who sets them expects something of them."""
    with pytest.raises(ConfigError) as caught:
        validate(Config(checkpoint=settings, train={"steps": 10}), 1)
    assert complaint in str(caught.value)
