"""Settings of the section `optimizer` that would have no effect, or cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError
from tests.config.test_files import ROOT, run, world_size_of

REFUSED = [
    ({"name": "adamw", "momentum": 0.9}, "optimizer.momentum: found 0.9, but it has no effect with name=adamw"),
    ({"name": "lion", "eps": 1e-6}, "optimizer.eps: found 1e-06, but it has no effect with name=lion"),
    ({"name": "adafactor", "betas": [0.9, 0.99]}, "optimizer.betas: found"),
    ({"name": "sgd", "newton_schulz_steps": 6}, "has no effect with name=sgd; leave it at 5"),
    (
        {"name": "muon", "precondition_every": 5},
        "optimizer.precondition_every: found 5, but it has no effect",
    ),
    ({"noise_decay": 1.0}, "optimizer.noise_decay: found 1.0, but it has no effect with noise=0"),
    ({"clip": {"by": "value", "threshold": 1, "window": 20}}, "optimizer.clip.window: found 20"),
    ({"clip": {"by": "percentile", "threshold": 100}}, "optimizer.clip.threshold: found 100, expected a percentile"),
]


@pytest.mark.parametrize(("settings", "complaint"), REFUSED)
def test_refused(settings: dict[str, Any], complaint: str):
    """What has no effect is named, with the value to leave it at."""
    with pytest.raises(ConfigError) as caught:
        validate(Config(optimizer=settings, train={"steps": 10}), 1)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"eps": 1e-50}, {"clip": {"by": "value", "threshold": 1e-40}}, {"update_clip": 1e-39}]
)
def test_numbers_that_fp32_does_not_have(settings: dict[str, Any]):
    """An eps of 0 would make NaN of a row without a gradient."""
    with pytest.raises(ConfigError, match=r"expected a number above 0, and none nearer to 0 than 2\^-126"):
        Config(optimizer=settings)


AVERAGED = {"name": "schedule_free_adamw"}
CONSTANT, COSINE = {"name": "constant"}, {"name": "cosine"}
IN_PLACE = "which lowers the rate, and the averages of schedule_free_adamw are there in place of that; use "
FALLING: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "the default": (AVERAGED, COSINE, f"schedule.name: found cosine, {IN_PLACE}constant"),
    "a cooldown": (AVERAGED, {**CONSTANT, "decay_steps": 2}, f"schedule.decay_steps: found 2, {IN_PLACE}null"),
    "a phase that falls": (
        AVERAGED,
        {"name": "piecewise", "phases": [{**CONSTANT, "until_step": 5}, {**COSINE, "min_lr": 1e-5}]},
        f"schedule.name: found piecewise, {IN_PLACE}constant",
    ),
    "phases that stay": (
        AVERAGED,
        {"name": "piecewise", "phases": [{**CONSTANT, "until_step": 5}, {**CONSTANT, "lr": 1e-3, "warmup_steps": 2}]},
        None,
    ),
    "phases of less and less": (
        AVERAGED,
        {"name": "piecewise", "phases": [{**CONSTANT, "until_step": 5, "lr": 1e-2}, {**CONSTANT, "lr": 1e-3}]},
        f"schedule.name: found piecewise, {IN_PLACE}constant",
    ),
    "a group's own": (
        {**AVERAGED, "groups": [{"match": "head.*", "schedule": {"name": "linear"}}]},
        {**CONSTANT, "warmup_steps": 2},
        f"optimizer.groups.0.schedule.name: found linear, {IN_PLACE}constant",
    ),
    "a group that is not averaged": (
        {**AVERAGED, "groups": [{"match": "head.*", "optimizer": "lion", "schedule": {"name": "linear"}}]},
        CONSTANT,
        None,
    ),
    "a group that is": (
        {"groups": [{"match": "head.*", "optimizer": "schedule_free_adamw"}]},
        COSINE,
        "optimizer.groups.0.schedule: null follows schedule.name=cosine, which lowers the rate",
    ),
    "a group that is, with its own": (
        {"groups": [{"match": "head.*", "optimizer": "schedule_free_adamw", "schedule": CONSTANT}]},
        COSINE,
        None,
    ),
}


@pytest.mark.parametrize("name", FALLING)
def test_averages_take_the_place_of_a_decay(name: str):
    """A rate that falls, of whatever weights are averaged, is named."""
    optimizer, schedule, complaint = FALLING[name]
    config = Config(optimizer=optimizer, schedule=schedule, train={"steps": 10})
    if complaint is None:
        validate(config, 1)
        return
    with pytest.raises(ConfigError) as caught:
        validate(config, 1)
    assert [problem for problem in caught.value.problems if problem.startswith(complaint)], caught.value.problems


RECIPES = {
    "schedule-free AdamW": [
        "optimizer.name=schedule_free_adamw",
        "schedule.name=constant",
        "schedule.min_lr=0.0",
    ],
    "8-bit AdamW": ["optimizer.name=adamw8bit"],
    "8-bit Muon": ["optimizer.name=muon8bit"],
    "8-bit Lion": [
        "optimizer.name=lion8bit",
        "optimizer.lr=3.0e-4",
        "optimizer.betas=[0.9, 0.99]",
        "optimizer.weight_decay=0.3",
    ],
    "Lion": ["optimizer.name=lion", "optimizer.lr=3.0e-4", "optimizer.betas=[0.9, 0.99]", "optimizer.weight_decay=0.3"],
    "Adafactor": ["optimizer.name=adafactor", "optimizer.clip_grad_norm=null"],
    "Muon": ["optimizer.name=muon"],
    "MuonClip": ["optimizer.name=muon", "optimizer.qk_clip={threshold: 100, every: 1}"],
    "SOAP": ["optimizer.name=soap"],
    "SGD": ["optimizer.name=sgd", "optimizer.lr=0.3", "optimizer.momentum=0.9"],
    "rates by depth": ["optimizer.lr_scales.layer_decay=0.9", "optimizer.lr_scales.embedding=0.1"],
    "clip each number": ["optimizer.clip.by=value", "optimizer.clip.threshold=0.01"],
    "clip each weight": ["optimizer.clip.by=parameter", "optimizer.clip.threshold=0.1"],
    "clip each block": ["optimizer.clip.by=layer", "optimizer.clip.threshold=0.3"],
    "adaptive": ["optimizer.clip.by=unit", "optimizer.clip.threshold=0.01", "optimizer.clip_grad_norm=null"],
    "percentile": ["optimizer.clip.by=percentile", "optimizer.clip.threshold=90", "optimizer.clip.window=200"],
    "centralisation": ["optimizer.centralize=true"],
    "noise": ["optimizer.noise=1.0e-4"],
    "z-loss": ["model.z_loss=1.0e-4"],
    "half precision": ["precision.dtype=bf16"],
}
"""The overrides of docs/recipe.md, on top of configs/demo.yaml."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_check(name: str):
    """Each override of the page is in it as written here, and is valid for the demo."""
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert f"`{' '.join(RECIPES[name])}`" in page
    path = ROOT / "configs" / "demo.yaml"
    validate(load_config(path, RECIPES[name]), world_size_of(path))


def test_check_prints_the_bytes_of_state():
    """`config check` says what the optimizer keeps of a parameter."""
    output = run("check", str(ROOT / "configs" / "demo.yaml"), "--vocab-size", "8192", "optimizer.name=adamw8bit")
    assert "adamw8bit, 2.03 bytes of state a parameter" in output


GROUPS = {
    "nothing by that name": (
        [{"match": "blocks.*.attn.*", "lr_scale": 0.5}],
        "optimizer.groups.0.match: no weight has a name like 'blocks.*.attn.*'; there are embedding.weight, "
        "blocks.*.attention_norm.weight",
    ),
    "no pattern": ([{"match": [], "lr_scale": 0.5}], "optimizer.groups.0.match: empty; name some weights"),
    "all taken before": (
        [{"match": "blocks.*", "lr_scale": 0.5}, {"match": ["head.*", "blocks.0.*"], "lr_scale": 2.0}],
        "optimizer.groups.1.match: all that 'blocks.0.*' has (blocks.0.attention_norm.weight, ",
    ),
    "nothing set": ([{"match": "head.*"}], "optimizer.groups.0: it sets nothing; leave it out, or set lr_scale, "),
    "frozen, with a rate": (
        [{"match": "head.*", "frozen": True, "lr_scale": 2.0}],
        "optimizer.groups.0.lr_scale: found 2.0, but it has no effect with frozen=true",
    ),
    "all frozen": ([{"match": "*", "frozen": True}], "optimizer.groups: every weight is frozen"),
    "a threshold of no clipping": (
        [{"match": "head.*", "clip_threshold": 1.0}],
        "optimizer.groups.0.clip_threshold: found 1.0, but it has no effect with optimizer.clip=null",
    ),
    "plateau of a group": (
        [{"match": "head.*", "schedule": {"name": "plateau"}}],
        "optimizer.groups.0.schedule.name: plateau is for the schedule of the run",
    ),
    "a warmup longer than the run": (
        [{"match": "head.*", "schedule": {"warmup_steps": 11}}],
        "optimizer.groups.0.schedule.warmup_steps: 11 is more than the 10 steps of the run; use 10 or less",
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_refused(name: str):
    """Patterns that have no weight, or none left; settings that have no effect in a group."""
    groups, complaint = GROUPS[name]
    with pytest.raises(ConfigError) as caught:
        validate(Config(optimizer={"groups": groups}, train={"steps": 10}, model={"vocab_size": 64}), 1)
    assert complaint in str(caught.value)


OTHERS = [
    (
        {"optimizer": {"clip": {"by": "group", "threshold": 1}}},
        "optimizer.clip.by: group, but optimizer.groups is empty",
    ),
    (
        {"optimizer": {"qk_clip": {}}, "model": {"qk_norm": True}},
        "optimizer.qk_clip: with model.qk_norm the size of queries and keys does not depend on their weights; use null",
    ),
    (
        {"optimizer": {"qk_clip": {}}, "model": {"attention_soft_cap": 30.0}},
        "optimizer.qk_clip: model.attention_soft_cap bounds the logits already",
    ),
    (
        {"optimizer": {"qk_clip": {}}, "parallel": {"pad_tokens": True}},
        "optimizer.qk_clip: parallel.pad_tokens adds tokens whose logits would count",
    ),
    (
        {"optimizer": {"qk_clip": {}, "groups": [{"match": "blocks.0.attention.*", "frozen": True}]}},
        "optimizer.qk_clip: it would change weights that optimizer.groups has frozen, blocks.0.attention.q.weight, ",
    ),
    (
        {"optimizer": {"offload": True}, "parallel": {"zero_stage": 3, "engine": "deepspeed"}},
        "optimizer.offload: engine=deepspeed keeps masters and state where the weights are; use engine=fsdp2",
    ),
    (
        {"optimizer": {"decay": {"shape": "cosine"}}},
        "optimizer.decay.shape: found cosine, but it has no effect with end",
    ),
    (
        {"optimizer": {"weight_decay": 0.0, "decay": {"kind": "coupled"}}},
        "optimizer.decay.kind: found coupled, but it has no effect with weight_decay=0; leave it at decoupled",
    ),
    (
        {"optimizer": {"decay": {"kind": "coupled"}}, "model": {"mup": {"base_hidden_size": 64}}},
        "optimizer.decay.kind: coupled decay has no known rule for other widths",
    ),
    (
        {
            "optimizer": {"groups": [{"match": "head.*", "optimizer": "sgd"}]},
            "model": {"mup": {"base_hidden_size": 64}},
        },
        "model.mup: how sgd scales with the width is not known here",
    ),
    (
        {
            "optimizer": {"groups": [{"match": "head.*", "frozen": True}]},
            "batch": {"noise_scale": {"every": 1}, "global_batch_size": 2},
        },
        "batch.noise_scale: the gradients of single micro-batches are measured with those of frozen weights",
    ),
]


@pytest.mark.parametrize(("sections", "complaint"), OTHERS)
def test_conflicts_refused(sections: dict[str, Any], complaint: str):
    """Between groups or decay and other settings."""
    with pytest.raises(ConfigError) as caught:
        validate(Config(**{"train": {"steps": 10}, **sections}), 1)
    assert complaint in str(caught.value)
