"""Stages of rising lengths: when they begin, what each is by itself, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.batch_sizes import batch_sizes, stage_starts, steps_for_tokens, tokens_before
from megalite.config.length_stages import length_stages, plan_stage, stage_of_steps
from megalite.config.schema import BatchConfig, Config
from megalite.config.validate import validate
from megalite.errors import ConfigError, UserError

SOURCES = [{"path": "data/short"}]


def config(stages: list[dict[str, Any]], **sections: dict[str, Any]) -> Config:
    batch = {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "seq_len": 16,
        "stages": stages,
        **sections.pop("batch", {}),
    }
    model = {"hidden_size": 32, "num_heads": 4, "vocab_size": 101, **sections.pop("model", {})}
    train = {"steps": 100, **sections.pop("train", {})}
    data = {"train": SOURCES, **sections.pop("data", {})}
    return Config(**{"batch": batch, "model": model, "train": train, "data": data, **sections})


BATCHES = {
    "plain": BatchConfig(global_batch_size=8, seq_len=16),
    "steps": BatchConfig(
        global_batch_size=8,
        seq_len=16,
        stages=[{"from_step": 5, "seq_len": 64, "global_batch_size": 2}, {"from_step": 8, "seq_len": 256}],
    ),
    "tokens": BatchConfig(
        global_batch_size=4,
        seq_len=16,
        stages=[{"from_tokens": 1000, "seq_len": 48}, {"from_tokens": 1500, "global_batch_size": 1}],
    ),
    "behind a ramp": BatchConfig(
        global_batch_size=8,
        seq_len=16,
        ramp={"start_size": 2, "samples": 24},
        stages=[{"from_step": 12, "seq_len": 32}],
    ),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_counts_by_walking(batch):
    """Tokens before every step, and the step that first reaches any number of them, by adding them up."""
    starts, sizes, before = stage_starts(batch), batch_sizes(batch), [0]
    for step in range(1, 60):
        length = [start.seq_len for start in starts if start.first_step <= step][-1]
        before.append(before[-1] + sizes.size(step) * length)
    assert [tokens_before(batch, step) for step in range(1, 61)] == before
    for tokens in range(0, before[50], 7):
        assert steps_for_tokens(batch, tokens) == next(step for step in range(60) if before[step] >= tokens)
    for start, stage in zip(starts[1:], batch.stages, strict=True):
        assert start.first_token == before[start.first_step - 1]
        if stage.from_tokens is not None:
            assert before[start.first_step - 2] < stage.from_tokens <= before[start.first_step - 1]


def test_what_a_stage_is_by_itself():
    """Lengths, batches, rotation and data of each; steps, positions and the schedule are the whole run's."""
    rope, long = {"theta": 500000.0}, [{"path": "data/long", "weight": 2.0}]
    stages = [
        {"from_step": 11, "seq_len": 64, "global_batch_size": 2, "micro_batch_size": 1, "rope": rope},
        {"from_step": 21, "seq_len": 256, "train": long},
    ]
    whole = config(stages, train={"steps": None, "tokens": 8 * 16 * 10 + 2 * 64 * 10 + 2 * 256 * 5 - 100})
    first, second, third = length_stages(whole)
    assert [(each.first_step, each.last_step) for each in (first, second, third)] == [(1, 10), (11, 20), (21, 25)]
    for stage in (first, second, third):
        assert (stage.config.train.steps, stage.config.train.tokens, stage.config.batch.stages) == (25, None, ())
        plan = plan_stage(whole, stage, 1)
        assert plan.model.max_positions == 256
        assert (plan.total_steps, plan.total_tokens) == (25, 8 * 16 * 10 + 2 * 64 * 10 + 2 * 256 * 5)
        assert plan.batch_sizes == batch_sizes(whole.batch)
        assert (plan.first_step, plan.last_step) == (stage.first_step, stage.last_step)
    assert [each.config.batch.seq_len for each in (first, second, third)] == [16, 64, 256]
    assert [each.config.batch.micro_batch_size for each in (first, second, third)] == [2, 1, 1]
    assert [each.config.model.rope.theta for each in (first, second, third)] == [10000.0, 500000.0, 500000.0]
    names = [[source.name for source in each.config.data.train] for each in (first, second, third)]
    assert names == [[None], ["short-64"], ["long-256"]]
    assert [str(each.config.data.train[0].path) for each in (first, second, third)] == [
        "data/short",
        "data/short",
        "data/long",
    ]


def test_sources_have_names_of_their_own():
    """In every stage: what a run has read of each is counted by name."""
    stages = [
        {"from_step": 11, "seq_len": 64},
        {"from_step": 21, "global_batch_size": 4},
        {"from_step": 31, "seq_len": 128, "train": [{"path": "data/short"}, {"path": "a", "name": "b"}]},
        {"from_step": 41, "seq_len": 256},
    ]
    names = [[source.name for source in each.config.data.train] for each in length_stages(config(stages))]
    assert names == [[None], ["short-64"], ["short-64-21"], ["short-128", "b"], ["short-256", "b-256"]]


def test_a_run_of_one_length_is_one_stage():
    """Untouched."""
    whole = config([])
    (stage,) = length_stages(whole)
    assert stage.config is whole
    assert (stage.first_step, stage.last_step) == (1, 100)


def test_chunks_for_the_long_stage_alone():
    """What has no effect in short sequences is there for the long ones; without any it is refused."""
    stages = [{"from_step": 11, "seq_len": 64}]
    validate(config(stages, train={"mlp_chunk_tokens": 100}), 1)
    with pytest.raises(ConfigError, match=r"128 has no effect, a rank's MLP has 128 tokens of a micro-batch"):
        validate(config(stages, train={"mlp_chunk_tokens": 128}), 1)


def test_stage_of_steps():
    """Where they are all of one."""
    whole = config([{"from_step": 11, "seq_len": 64}])
    assert stage_of_steps(whole, 1, 10).config.batch.seq_len == 16
    assert stage_of_steps(whole, 11, 100).config.batch.seq_len == 64
    with pytest.raises(UserError, match="step 11 is the first of another"):
        stage_of_steps(whole, 10, 11)


REFUSED = {
    "no beginning": ([{"seq_len": 64}], {}, "batch.stages.0: found neither from_step nor from_tokens"),
    "two beginnings": ([{"from_step": 3, "from_tokens": 500}], {}, "batch.stages.0: found both from_step and"),
    "not after": (
        [{"from_step": 9, "seq_len": 32}, {"from_step": 9, "seq_len": 64}],
        {},
        "batch.stages.1: begins at step 9, and the stage before at 9",
    ),
    "beyond the end": (
        [{"from_step": 101, "seq_len": 32}],
        {},
        "batch.stages.0: begins at step 101, and the run ends at 100",
    ),
    "a batch of another stage": (
        [{"from_step": 9, "seq_len": 32, "global_batch_size": 3}],
        {},
        "batch.global_batch_size: 3 is not a multiple of micro_batch_size x dp = 2 x 1 = 2; use 2 or 4 (from step 9 on",
    ),
    "positions": (
        [{"from_step": 9, "seq_len": 64}],
        {"model": {"max_positions": 32}},
        "batch.seq_len: 64 is longer than model.max_positions=32",
    ),
    "growing batches": (
        [{"from_step": 9, "seq_len": 64}],
        {"batch": {"noise_scale": {"max_batch_size": 64}}},
        "batch.noise_scale.max_batch_size: found beside batch.stages",
    ),
    "epochs": (
        [{"from_step": 9, "seq_len": 64}],
        {"data": {"mix": {"epochs": {"short": 2.0}}}},
        "data.mix: epochs, stages and ranks are for runs of one length",
    ),
    "a ramp that is not over": (
        [{"from_step": 4, "seq_len": 64}],
        {"batch": {"ramp": {"start_size": 2, "samples": 100}}},
        "batch.ramp: has not ended when the stage from step 4 on begins",
    ),
    "nothing new": ([{"from_step": 9}], {}, "batch.stages.0: changes nothing; give it a seq_len, or leave it out"),
    "other channels": (
        [{"from_step": 9, "rope": {"theta": 5e5}}],
        {"model": {"rope": {"interleaved": True}}},
        "batch.stages.0.rope.interleaved: found False, and the weights are trained with True",
    ),
    "one name twice": (
        [{"from_step": 9, "seq_len": 64, "train": [{"path": "a", "name": "short"}]}],
        {},
        "batch.stages: 'short' is a source of two stages",
    ),
    "one folder's name twice": (
        [{"from_step": 9, "seq_len": 64}],
        {"data": {"train": [{"path": "web/train", "weight": 0.5}, {"path": "code/train", "weight": 0.5}]}},
        "data.train: several sources are called 'train'; give each a name of its own",
    ),
    "one folder's name twice in a stage": (
        [{"from_step": 9, "seq_len": 64, "train": [{"path": "web/b", "weight": 1}, {"path": "code/b", "weight": 1}]}],
        {},
        "batch.stages.0.train: several sources are called 'b'; give each a name of its own",
    ),
}


@pytest.mark.parametrize(("stages", "sections", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(stages, sections, words):
    """In a sentence, before anything starts."""
    with pytest.raises(ConfigError) as caught:
        validate(config(stages, **sections), 1)
    (problem,) = caught.value.problems
    assert problem.startswith(words)
