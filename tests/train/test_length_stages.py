"""Runs whose sequences grow in mid-run train as one engine would that is given these very batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megalite.checkpoint.format import stored_model
from megalite.checkpoint.reader import CheckpointReader
from megalite.cli.main import app
from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.data import audit
from megalite.data.cursor import DataCursor, Gap
from megalite.data.loader import Loader
from megalite.engine.build import build_engine
from megalite.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from megalite.model.initialize import FreshWeights
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.optim.schedules import learning_rate
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.train.preflight import preflight_stages
from tests.kit.data import random_documents, write_tokens_folder
from tests.kit.runs import events, metrics, write_run
from tests.kit.spawn import run_ranks
from tests.train.forked import launch

TOLERANCE = 1e-5

STAGES = [
    {"from_step": 4, "seq_len": 64, "global_batch_size": 4, "micro_batch_size": 2, "rope": {"theta": 500000.0}},
    {"from_tokens": 1500, "seq_len": 128, "global_batch_size": 2, "micro_batch_size": 1},
]
"""Steps 1 to 3 have 4 sequences of 32, 4 to 8 have 4 of 64, 9 and 10 have 2 of 128."""

LAYOUTS = {
    "one": (1, {"zero_stage": 0}),
    "dp2-zero3": (2, {"dp": 2, "zero_stage": 3, "engine": "deepspeed"}),
    "fsdp2": (2, {"dp": 2, "zero_stage": 3, "engine": "fsdp2"}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
}


def config_of(folder: Path, parallel: dict, **sections: dict) -> Config:
    """A run of ten steps in three stages, the last of them on data of its own."""
    for name, seed in (("short", 0), ("long", 1)):
        if not (folder.parent / name).exists():
            write_tokens_folder(folder.parent / name, random_documents(60, longest=150, seed=seed))
    folder.mkdir(exist_ok=True)
    train = [{"path": str(folder.parent / "short")}]
    stages = [STAGES[0], {**STAGES[1], "train": [{"path": str(folder.parent / "long"), "name": "long"}]}]
    if "dp" in parallel:
        stages[1]["micro_batch_size"] = 1
    batch = {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 4, "stages": stages}
    data = {"train": train, "valid": [{"path": str(folder.parent / "long"), "name": "far"}]}
    more = {"train": {"steps": 10, "eval_every": 5, "eval_batches": 1}, "checkpoint": {"every": 2, "keep_last": 9}}
    return load_config(
        write_run(folder, data=data, batch=batch, parallel={"tp": 1, **parallel}, **{**more, **sections})
    )


def by_one_engine(config: Config) -> list[float]:
    """Losses of one engine that is given the batches of every stage, and turned by another rotation in between."""
    stages, _ = preflight_stages(config, 1)
    axes, device = connect(Mesh(), 0), torch.device("cpu")
    plan = stages[0].plan
    engine = build_engine(stages[0].config, plan, axes, device, FreshWeights(plan.model, config.run.seed))
    losses = []
    for stage in stages:
        engine.stage._frequencies = Stage(StageSpec(stage.plan.model))._frequencies
        loader = Loader.for_run(stage.samples, stage.config, plan.batch_sizes, dp_size=1, dp_rank=0)
        for step in range(stage.plan.first_step, stage.plan.last_step + 1):
            lr = learning_rate(step, plan.total_steps, config.optimizer, plan.schedule)
            losses.append(engine.train_step(loader.step_batches(step), lr).loss)
    return losses


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def truth(home) -> list[float]:
    (losses,) = run_ranks(by_one_engine, 1, config_of(home / "truth", {"zero_stage": 0}))
    return losses


def curve(config: Config) -> list[float]:
    return [record["loss"] for record in metrics(config.run.dir)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(home, truth, name):
    """The losses of all steps; tokens, samples, data and models as the stages say."""
    world_size, parallel = LAYOUTS[name]
    config = config_of(home / name, parallel)
    assert launch(config, world_size) == EXIT_DONE
    assert curve(config) == pytest.approx(truth, abs=TOLERANCE)
    records = metrics(config.run.dir)
    assert [each["tokens"] for each in records] == [128, 256, 384, *range(640, 1665, 256), 1920, 2176]

    (turned,) = (event for event in events(config.run.dir) if event["event"] == "rotation_changed")
    means = [
        sum(each["loss"] * each["num_tokens"] for each in turned[key]) / sum(each["num_tokens"] for each in turned[key])
        for key in ("before", "now")
    ]
    assert turned["step"] == 3
    assert means[1] == pytest.approx(truth[3], abs=TOLERANCE), "the batch that comes next, and the weights as they are"
    assert abs(means[0] - means[1]) > 1e-7

    checkpoint = CheckpointReader(config.run.dir / "checkpoints/step-0000010")
    assert checkpoint.manifest.progress.consumed == {"short": 12, "short-64": 20, "long": 4}
    (done,) = (event for event in events(config.run.dir) if event["event"] == "done")
    assert {name: each["tokens"] for name, each in done["consumed"].items()} == {
        "short": 12 * 32,
        "short-64": 20 * 64,
        "long": 4 * 128,
    }
    stages, _ = preflight_stages(config, world_size)
    chain = audit.EMPTY_CHAIN
    for stage, (first, stop) in zip(stages, ((0, 12), (12, 32), (32, 36)), strict=True):
        chain = audit.chain(chain, stage.samples, first, stop)
        assert stage.samples.identity(first).epoch == 0, "a stage reads its data from the beginning"
    assert checkpoint.manifest.progress.data_chain == chain
    for step, theta in ((3, 10000.0), (4, 500000.0), (10, 500000.0)):
        saved = CheckpointReader(config.run.dir / f"checkpoints/step-{step:07d}")
        assert stored_model(saved.folder, saved.manifest).rope.theta == theta


@pytest.mark.parametrize("stop_after", [2, 3, 4, 8, 9])
def test_stopped_anywhere(home, truth, stop_after, tmp_path):
    """Within a stage, at its end or behind its beginning: the run goes on in the stage that it was in."""
    del tmp_path
    config = config_of(home / f"stopped-{stop_after}", {"zero_stage": 1})
    assert launch(config, 1, stop_after=stop_after) == EXIT_REQUEUE
    assert launch(config, 1) == EXIT_DONE
    assert curve(config) == pytest.approx(truth, abs=TOLERANCE)
    chains = [
        CheckpointReader(folder / "checkpoints/step-0000010").manifest.progress.data_chain
        for folder in (config.run.dir, home / "one/run")
        if folder.exists()
    ]
    assert len(set(chains)) == 1


def test_stages_to_come_may_be_others(home):
    """A stage that has begun is a fact; one that has not is a plan, and may be left out or come later."""
    config = config_of(home / "replanned", {"zero_stage": 1})
    assert launch(config, 1, stop_after=5) == EXIT_REQUEUE
    stages = config.batch.stages
    former = config.batch.model_copy(update={"stages": (stages[0].model_copy(update={"seq_len": 128}), stages[1])})
    with pytest.raises(ConfigError, match=r"batch.stages.0.seq_len: 64 in .*, 128 now"):
        launch(config.model_copy(update={"batch": former}), 1)
    fewer = config.batch.model_copy(update={"stages": ()})
    with pytest.raises(ConfigError, match=r"batch.stages.0: step 5 is done, and .* has a stage that begins at step 4"):
        launch(config.model_copy(update={"batch": fewer}), 1)
    smaller = stages[0].model_copy(update={"micro_batch_size": 1})
    alone = config.batch.model_copy(update={"stages": (smaller,)})
    assert launch(config.model_copy(update={"batch": alone}), 1) == EXIT_DONE
    records = metrics(config.run.dir)
    assert [each["tokens"] for each in records][-2:] == [128 * 3 + 256 * 6, 128 * 3 + 256 * 7]


def test_what_was_left_out_before_is_of_other_data(home):
    """A stage reads its data from the beginning, also where a rollback has left out some before it."""
    stages, _ = preflight_stages(config_of(home / "gaps", {"zero_stage": 1}), 1)
    second = stages[1].samples
    account = DataCursor(gaps=(Gap(4, 100), Gap(20, 8)))
    after = second.following(account)
    assert [after.identity(index) for index in range(12, 20)] == [second.identity(index) for index in range(12, 20)]
    assert after.identity(20) == second.identity(28), "what it has left out itself stays left out"
    assert after.drawn(20) == {"short-64": 16}


def test_a_stop_at_the_border(home, truth):
    """Asked for in the last step of a stage, it is heeded there."""
    config = config_of(home / "border", {"zero_stage": 1})
    assert launch(config, 1, stop_after=3) == EXIT_REQUEUE
    assert [each["event"] for each in events(config.run.dir)].count("start") == 1
    assert launch(config, 1) == EXIT_DONE
    assert curve(config) == pytest.approx(truth, abs=TOLERANCE)


def test_shown_as_the_run_has_read_them(home):
    """`data show` of any stage, wherever the run stands."""
    config = config_of(home / "shown", {"zero_stage": 1})
    assert launch(config, 1) == EXIT_DONE
    for steps, shape in (("2:3", [1, 4, 32]), ("5:6", [1, 4, 64]), ("9:11", [2, 2, 128])):
        done = CliRunner().invoke(
            app, ["data", "show", str(config.run.dir / "config.yaml"), "--steps", steps, "--out", str(home / "s.npz")]
        )
        assert (done.exit_code, done.stderr) == (0, "")
        assert f"of shape {shape}" in done.stdout
    done = CliRunner().invoke(app, ["data", "show", str(config.run.dir / "config.yaml"), "--samples", "10:14"])
    assert "steps 3 to 4 have sequences of 2 lengths" in str(done.exception), "samples 10 and 11 are of the first stage"
