"""The sample plug-ins are trained with: equal in every layout, resumed, and named when they fail."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megalite.addition import addition
from megalite.config.brought import LOSSES
from megalite.config.load import load_config
from megalite.config.plan import make_plan
from megalite.engine.batch_cut import documents_of_batch
from megalite.engine.build import build_stage
from megalite.errors import UserError
from megalite.layers.documents import Targets
from megalite.model.initialize import FreshWeights
from megalite.optim.optimizer import SlicedOptimizer
from megalite.optim.optimizers import build_optimizer
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.plugins import load_plugins
from tests.kit.batches import micro_batch
from tests.kit.plugins import SAMPLES, added, loaded, sample
from tests.kit.runs import events, megalite, metrics, write_run
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config, train

TRAINING = ("activations", "norms", "attentions", "optimizers", "schedules", "losses", "metrics", "components")

STEPS = 4
TOLERANCE = 2e-5
"""fp32 sums in another order; signs of a momentum near zero may differ."""

PLAIN: dict[str, Any] = {"batch": {"micro_batch_size": 1, "global_batch_size": 4, "seq_len": 16}}
BROUGHT: dict[str, Any] = {
    **PLAIN,
    "model": {"activation": "squared_gate", "norm": "magnitude_norm", "attention": "softmax_one", "sliding_window": 5},
    "optimizer": {"name": "signum", "options": {"beta": 0.8}},
    "schedule": {"name": "sawtooth", "options": {"teeth": 2}, "warmup_steps": 1},
    "train": {"steps": 20, "compile": "off", "loss": {"name": "focal", "options": {"gamma": 1.0}}},
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "sequence_parallel": True},
    {"dp": 2, "zero_stage": 2},
    {"dp": 2, "zero_stage": 3, "engine": "deepspeed"},
    {"dp": 2, "zero_stage": 3, "engine": "fsdp2"},
    {"pp": 2, "zero_stage": 1},
)


def _curves(*settings: dict[str, Any]) -> list[list[tuple[float, float]]]:
    load_plugins(sample(name) for name in TRAINING)
    return [train(tiny_config(**each), STEPS) for each in settings]


def test_every_layout_is_equal():
    """All that a model is made of at once; losses and gradient norms of one rank and of two."""
    unbent = {**PLAIN, "train": {"steps": 20, "compile": "off", "loss": {"name": "focal", "options": {"gamma": 0.0}}}}
    one, focal, usual = run_ranks(_curves, 1, BROUGHT, unbent, PLAIN)[0]
    torch.testing.assert_close(focal, usual, rtol=TOLERANCE, atol=TOLERANCE)  # without gamma it is the cross-entropy
    settings = [{**BROUGHT, "parallel": layout} for layout in LAYOUTS]
    for curves in run_ranks(_curves, 2, *settings):
        for layout, curve in zip(LAYOUTS, curves, strict=True):
            assert torch.allclose(torch.tensor(curve), torch.tensor(one), rtol=TOLERANCE, atol=TOLERANCE), layout


def write_brought(folder: Path, **sections: dict[str, Any]) -> Path:
    """A tiny run with all plug-ins of training."""
    path = write_run(
        folder,
        **{
            "parallel": {"tp": 1, "dp": 2, "zero_stage": 1},
            "optimizer": BROUGHT["optimizer"],
            "train": {"components": {"coverage": None}, "eval_every": 3},
            "monitor": {"metrics": {"share_in_long_documents": {"min_tokens": 20}}, "tensorboard": False},
            "checkpoint": {"every": 3},
            **sections,
        },
    )
    config = {"plugins": [sample(name) for name in TRAINING], **yaml.safe_load(path.read_text())}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_a_component_goes_on(tmp_path):
    """A run on two ranks that was cut at step 3 has the lines of one that was not: the component's state came back, and
    it counted the tokens of both ranks; the run's config finds the plug-ins again. The component ends a run, too."""
    config, whole, cut = write_brought(tmp_path), tmp_path / "run", tmp_path / "cut"
    done = megalite("train", config)
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-0000006")
    assert megalite("train", config, f"run.dir={cut}").returncode == 0
    expected, found = metrics(whole), metrics(cut)
    for key in ("step", "loss", "coverage", "share_in_long_documents"):
        assert [line[key] for line in found] == [line[key] for line in expected]
    assert expected[-1]["coverage"] > 1.5 * expected[0]["coverage"] > 0
    kept = load_config(whole / "config.yaml")
    assert kept.train.components == {"coverage": None}

    enough = expected[1]["coverage"]
    done = megalite("train", write_brought(tmp_path / "early", train={"components": {"coverage": {"enough": enough}}}))
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "early" / "run")) == 2
    ended = [each["why"] for each in events(tmp_path / "early" / "run") if each["event"] == "early_stop"]
    assert "of the vocabulary was seen" in ended[0]


FAILING = """
from megalite import extend
from megalite.train.components.component import Component

STATES = {"object": {"mine": object()}, "number": 3, "counts": {"inside": {7: 1}}}

@extend.component("failing")
class Failing(Component):
    def __init__(self, context, *, when: str):
        self.when, self.measured = when, False
        if when == "made":
            raise RuntimeError("the coffee is out")

    def after_step(self, step, result):
        return 3 if self.when == "wish" else None

    def stop_reason(self):
        if self.when == "asked" and self.measured:
            raise RuntimeError("the coffee is out")
        return 5 if self.when == "reason" else ""

    def close(self):
        if self.when == "close":
            raise RuntimeError("the coffee is out")

    def measure(self, step, result):
        self.measured = True
        if self.when == "measure":
            raise RuntimeError("the coffee is out")
        if self.when == "figure":
            step.figures["loss"] = 1.0
        if self.when == "tensor":
            step.figures["mine"] = "high"

    def state(self):
        return STATES.get(self.when, {"when": self.when})

    def load_state(self, state):
        if state and self.when == "load":
            raise RuntimeError("the coffee is out")
"""


def test_failures_are_named(tmp_path):
    """Before the first step they are bad input; in the middle of training a fault, with the component's name."""
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    config = write_run(
        tmp_path, parallel={"tp": 1, "dp": 1}, train={"steps": 2}, monitor={"tensorboard": False}, run={"dir": "none"}
    )
    config.write_text(f"plugins: [{path}]\n{config.read_text()}")

    def run(when: str, folder: str, *others: str) -> tuple[int, str]:
        component = f"train.components={{failing: {{when: {when}}}}}"
        done = megalite("train", config, component, f"run.dir={tmp_path / folder}", *others)
        return done.returncode, done.stderr + done.stdout

    for when, code, words in (
        ("made", 2, "train.components.failing: could not be made: RuntimeError: the coffee is out"),
        ("measure", 1, "component failing (failing_"),
        ("figure", 1, "'loss' stands in metrics.jsonl already"),
        ("tensor", 1, "figure 'mine' is 'high', expected a number"),
        ("object", 2, "at step 0 (TypeError: Object of type object is not JSON serializable)"),
        ("number", 2, "(TypeError: state 3, expected a dict whose keys are text)"),
        ("counts", 2, "(TypeError: state {7: 1}, expected a dict whose keys are text)"),
        ("reason", 2, "(TypeError: it returned 5, expected str)"),
        ("wish", 1, "failed in after_step: TypeError: it returned 3, expected RollBack or NoneType"),
        ("asked", 1, "failed in stop_reason: RuntimeError: the coffee is out"),
        ("close", 1, "failed in close: RuntimeError: the coffee is out"),
    ):
        found, said = run(when, when)
        assert found == code, said
        assert words in said
        assert "failing" in said
    assert run("never", "resumed")[0] == 0
    found, said = run("load", "resumed", "train.steps=4")
    assert found == 2, said
    assert "component failing: it cannot go on from its state at step 2 (RuntimeError: the coffee is out)" in said


BUILT = """
from torch import nn

from megalite import extend
from megalite.layers.norm import RMSNorm


class Norm(RMSNorm):
    def __init__(self, size, eps, *, tp, sequence_parallel):
        super().__init__(size, 1 / eps if eps != 0.125 else 1 / 0, tp=tp, sequence_parallel=sequence_parallel)

extend.norm("broken")(Norm)
extend.norm("one_less", has_bias=True)(RMSNorm)
class Counting(RMSNorm):
    def __init__(self, size, eps, *, tp, sequence_parallel):
        super().__init__(size, eps, tp=tp, sequence_parallel=sequence_parallel)
        self.inner = nn.BatchNorm1d(size, affine=False)

class Constant(RMSNorm):
    def __init__(self, size, eps, *, tp, sequence_parallel):
        super().__init__(size, eps, tp=tp, sequence_parallel=sequence_parallel)
        self.register_buffer("scale", self.weight.detach() + 1, persistent=False)

extend.norm("counting")(Counting)
extend.norm("constant")(Constant)
extend.norm("no_module")(type("Nothing", (), {"__init__": lambda self, size, eps, *, tp, sequence_parallel: None}))


@extend.optimizer("inner")
class Inner:
    def __init__(self, *, power: float = 1.0):
        self.power = power

    def update(self, weights, gradients, states, *, lr, decay, step):
        pass


@extend.optimizer("outer", tables="inner", vectors="inner")
class Outer(Inner):
    def __init__(self, *, beta: float = 0.5):
        self.beta = 1 / beta
"""


def test_what_fails_when_it_is_built(tmp_path):
    """It is bad input: the setting is named, before the first step. An optimizer's options are its own, not those of
    another plug-in's that it leaves some weights to."""

    def build(**sections: Any) -> SlicedOptimizer:
        config = tiny_config(**sections)
        plan = make_plan(config, 1)
        stage = build_stage(config, plan, connect(Mesh(), 0), torch.device("cpu"), FreshWeights(plan.model, 0))
        return build_optimizer(stage, config.optimizer)

    path = tmp_path / "built.py"
    path.write_text(BUILT)
    with loaded(str(path)):
        for model, complaint in (
            ({"norm": "broken", "norm_eps": 0.125}, "broken: could not be made: ZeroDivisionError: division by zero"),
            ({"norm": "one_less"}, r"one_less: .*: it has the parameters \{'weight': \(32,\)\}, expected .*'bias': "),
            ({"norm": "counting"}, r"counting: .* it has the buffers \['inner.running_mean', .*no checkpoint keeps"),
            ({"norm": "no_module"}, "no_module: could not be made: AttributeError: "),
        ):
            with pytest.raises(UserError, match=f"model.norm: {complaint}"):
                build(model=model)
        build(model={"norm": "constant"})
        with pytest.raises(UserError, match=r"optimizer.name: outer: could not be made: ZeroDivisionError"):
            build(optimizer={"name": "outer", "options": {"beta": 0.0}})
        rules = build(optimizer={"name": "outer", "options": {"beta": 0.25}})._rules
        assert (rules["outer"].beta, rules["inner"].power) == (4.0, 1.0)
        assert build(optimizer={"name": "inner", "options": {"power": 3.0}})._rules["inner"].power == 3.0


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("None", "AttributeError: 'NoneType' object has no attribute 'shape'"),
        ("logits", r"ValueError: its shape is \[8, 101\], expected \[8\]"),
        ("labels.float()", "RuntimeError: element 0 of tensors does not require grad"),
    ],
)
def test_a_loss_that_fails_is_named(code, complaint):
    """Whatever is wrong with it."""
    logits_to_losses = eval(f"lambda logits, labels: {code}")
    with added(LOSSES, "mine", addition("loss", "mine", logits_to_losses, ("logits", "labels"))):
        config = tiny_config(train={"loss": {"name": "mine"}})
        plan = make_plan(config, 1)
        stage = build_stage(config, plan, connect(Mesh(), 0), torch.device("cpu"), FreshWeights(plan.model, 0))
        batch = micro_batch([0], seq_len=8, vocab_size=101)
        with pytest.raises(RuntimeError, match=rf"the loss of a plug-in \(train.loss\): {complaint}"):
            stage(batch.tokens, documents_of_batch(batch), Targets(batch.labels, torch.ones(8)))


def test_code_that_has_changed_is_told(tmp_path):
    """Not when a run goes on with the plug-ins that it had; when one is another, by an event and on the screen."""
    path = tmp_path / "mine.py"
    path.write_text("from megalite import extend\nextend.metric('mine')(lambda step, result, context: 1.0)\n")
    config = write_run(tmp_path, parallel={"tp": 1, "dp": 1}, monitor={"tensorboard": False, "metrics": {"mine": None}})
    config.write_text(f"plugins: [{path}]\n{config.read_text()}")
    for steps, code in ((1, path.read_text()), (2, path.read_text()), (3, path.read_text().replace("1.0", "2.0"))):
        path.write_text(code)
        done = megalite("train", config, f"train.steps={steps}", "schedule.warmup_steps=0")
        assert done.returncode == 0, done.stderr
        told = [each for each in events(tmp_path / "run") if each["event"] == "plugin_changed"]
        why = f"{path} is not the code that this run had before"
        assert [(each["step"], each["why"]) for each in told] == ([(2, why)] if steps == 3 else [])
        assert (f"step 2: {why}" in done.stdout) == (steps == 3)
    assert [line["mine"] for line in metrics(tmp_path / "run")] == [1.0, 1.0, 2.0]
    branch, trunk = tmp_path / "branch", tmp_path / "run" / "checkpoints" / "step-0000003"
    assert megalite("train", config, "train.steps=4", f"train.branch_from={trunk}", f"run.dir={branch}").returncode == 0
    assert "plugin_changed" not in {each["event"] for each in events(branch)}


def test_samples_are_short():
    """Each is under 60 lines, as docs/extending.md promises."""
    assert all(len(path.read_text().splitlines()) < 60 for path in SAMPLES.glob("*.py"))
