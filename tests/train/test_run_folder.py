"""Which configs may go on in a run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from megalite.config.load import dump_config, load_config
from megalite.config.schema import Config
from megalite.errors import ConfigError
from megalite.train.run_folder import CONFIG, METRICS, changed_settings, check_run_folder
from tests.kit.plugins import loaded, sample
from tests.kit.runs import write_run

NOT_OURS = {"model": {"activation": "squared_gate"}, "train": {"loss": {"name": "focal", "options": {"gamma": 1.0}}}}
COMPONENT = {"components": {"coverage": None}}


@pytest.fixture(autouse=True)
def _forgotten():
    with loaded():
        yield


def load_with(folder: Path, plugins: list[Path], **sections: dict) -> Config:
    """A config that names plug-ins, in a process that has loaded no others."""
    path = write_run(folder, **sections)
    path.write_text(yaml.safe_dump({"plugins": list(map(str, plugins)), **yaml.safe_load(path.read_text())}))
    with loaded():
        return load_config(path)


def leave_run(config: Config) -> Path:
    """The folder of a run that has done a step; its config."""
    config.run.dir.mkdir(parents=True)
    (config.run.dir / CONFIG).write_text(dump_config(config))
    (config.run.dir / METRICS).write_text("{}\n")
    return config.run.dir / CONFIG


def test_plugins_of_before_need_not_be_there(tmp_path):
    """Those of a run have moved, and one is gone with what it brought: the run goes on all the same."""
    before, now = tmp_path / "before", tmp_path / "now"
    for folder in (before, now):
        folder.mkdir()
        for name in ("activations", "losses", "components"):
            shutil.copy(sample(name), folder / f"{folder.name}_{name}.py")
    leave_run(
        load_with(tmp_path, sorted(before.iterdir()), **{**NOT_OURS, "train": {**NOT_OURS["train"], **COMPONENT}})
    )
    shutil.rmtree(before)
    (now / "now_components.py").unlink()
    check_run_folder(load_with(tmp_path, sorted(now.iterdir()), **NOT_OURS))


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"model": {"num_layers": 3}}, "model.num_layers: 2 in {former}, 3 now"),
        ({"model": {"activation": "relu"}}, "model.activation: 'squared_gate' in {former}, 'relu' now"),
        ({"batch": {"ramp": {"start_size": 4, "samples": 8}}}, "batch.ramp.start_size: None in {former}, 4 now"),
        ({"data": {"train": [{"path": "packed"}]}}, "data.train.0.path: '{packed}' in {former}, 'packed' now"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name: 'adamw' in {former}, 'lion' now"),
        ({"train": {"loss": None}}, "train.loss: {loss} in {former}, None now"),
        (
            {"train": {"loss": {"name": "focal", "options": {"gamma": 2}}}},
            "train.loss.options: {options} in {former}, {{'gamma': 2}} now",
        ),
        ({"train": {"loss": {"name": "focal"}}}, "train.loss.options: {options} in {former}, {{}} now"),
        ({"optimizer": {"name": "adamw8bit", "lr": 0.5}}, None),
    ],
)
def test_what_belongs_to_a_run(tmp_path, sections, complaint):
    """Every fixed setting that differs is named with both values; the others may change."""
    plugins = [Path(sample("activations")), Path(sample("losses"))]
    former = leave_run(load_with(tmp_path, plugins, **NOT_OURS))
    now = load_with(tmp_path, plugins, **{**NOT_OURS, **sections})
    if complaint is None:
        check_run_folder(now)
        return
    with pytest.raises(ConfigError) as error:
        check_run_folder(now)
    loss = NOT_OURS["train"]["loss"]
    found = {"former": former, "packed": tmp_path / "packed", "loss": loss, "options": loss["options"]}
    assert complaint.format(**found) in error.value.problems


AVERAGED = {"name": "schedule_free_adamw"}


@pytest.mark.parametrize(
    ("before", "now", "complaint"),
    [
        ({"name": "soap"}, {"name": "soap", "precondition_every": 3, "max_precondition_dim": 900}, None),
        ({"name": "muon"}, {"name": "muon8bit"}, None),
        ({"name": "lion8bit"}, {"name": "lion"}, None),
        ({"name": "lion"}, {"name": "muon8bit"}, "optimizer.name: 'lion' in"),
        ({"name": "soap"}, {"name": "soap", "max_precondition_dim": 40}, "optimizer.max_precondition_dim: 10000 in"),
        (AVERAGED, {**AVERAGED, "lr": 0.5, "betas": [0.9, 0.99]}, None),
        (AVERAGED, {**AVERAGED, "betas": [0.95, 0.95]}, "optimizer.betas: 0.9 in"),
        (AVERAGED, {"name": "adamw"}, "optimizer.name: 'schedule_free_adamw' in"),
        (AVERAGED, {**AVERAGED, "groups": [{"match": "head.*", "frozen": True}]}, "optimizer.groups: head.weight and"),
    ],
)
def test_optimizers_whose_state_goes_on(tmp_path, before, now, complaint):
    """Settings of an optimizer may change unless its state would not fit, which is said before anything is read."""
    leave_run(load_config(write_run(tmp_path, optimizer=before)))
    config = load_config(write_run(tmp_path, optimizer=now))
    if complaint is None:
        check_run_folder(config)
        return
    with pytest.raises(ConfigError) as error:
        check_run_folder(config)
    assert any(complaint in problem for problem in error.value.problems), error.value.problems


def test_a_config_that_is_older_than_a_setting(tmp_path):
    """What it does not name had the default; what it names and nobody knows any more is of no account."""
    config = load_config(write_run(tmp_path))
    former = leave_run(config)
    text = yaml.safe_load(former.read_text())
    del text["model"]["rope"]["theta"], text["batch"]["ramp"], text["train"], text["data"]["train"][0]["name"]
    text["model"]["gone"] = text["gone"] = 3
    former.write_text(yaml.safe_dump(text))
    assert changed_settings(former, config, 0) == []
    other = load_config(write_run(tmp_path, model={"rope": {"theta": 5.0}}))
    assert changed_settings(former, other, 0) == [f"model.rope.theta: 10000.0 in {former}, 5.0 now"]
