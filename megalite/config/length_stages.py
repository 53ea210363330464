"""A run in stages of rising lengths: what each of them is by itself.

    batch: {seq_len: 4096, stages: [{from_step: 1001, seq_len: 32768, rope: {theta: 5000000}}]}

    steps 1 to 1000      a run with sequences of 4096
    steps 1001 to 1200   a run with sequences of 32768 that goes on from step 1000

A stage is the config of such a run: everything that a config decides, from memory to the choice of kernels, is decided
for it anew, by what decides it for a run without stages. Only steps, the schedule of rates and the numbers of samples
count through the whole.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from megalite.config.batch_sizes import StageStart, batch_sizes, longest_sequence, stage_starts, tokens_before
from megalite.config.length import derive_steps, fill_schedule
from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config, LengthStageConfig, SourceConfig
from megalite.errors import UserError
from megalite.section import Section

SIZES = ("seq_len", "micro_batch_size", "global_batch_size")


@dataclass(frozen=True)
class LengthStage:
    """A stretch of the run whose sequences have one length."""

    number: int
    """From 0."""
    first_step: int
    last_step: int
    config: Config
    """Of the stage by itself: without stages, and with as many steps as the whole run."""


def length_stages(config: Config) -> tuple[LengthStage, ...]:
    """The stages of a run; one for a run without any."""
    starts, total = stage_starts(config.batch), derive_steps(config)
    lasts = [*(start.first_step - 1 for start in starts[1:]), total]
    if len(starts) == 1:
        return (LengthStage(0, 1, total, config),)
    configs = list(_configs(config))
    return tuple(
        LengthStage(number, start.first_step, last, own)
        for number, (start, last, own) in enumerate(zip(starts, lasts, configs, strict=True))
    )


def stage_of_steps(config: Config, first: int, last: int) -> LengthStage:
    """The stage that has some steps.

    Raises:
        UserError: they are of two.
    """
    stages = length_stages(config)
    found = [stage for stage in stages if stage.first_step <= last and first <= stage.last_step] or [stages[-1]]
    if len(found) > 1:
        raise UserError(
            f"steps {first} to {last} have sequences of {len(found)} lengths (batch.stages); step "
            f"{found[1].first_step} is the first of another, ask for the steps on one side of it"
        )
    return found[0]


def plan_stage(config: Config, stage: LengthStage, world_size: int, tokenizer_vocab_size: int | None = None) -> RunPlan:
    """The plan of a stage of a validated config; see `plan.make_plan`."""
    plan = make_plan(stage.config, world_size, tokenizer_vocab_size)
    total_tokens = tokens_before(config.batch, plan.total_steps + 1)
    return replace(
        plan,
        batch_sizes=batch_sizes(config.batch),
        full_batch_size=config.batch.global_batch_size,
        first_step=stage.first_step,
        last_step=stage.last_step,
        total_tokens=total_tokens,
    )


def check_length_stages(config: Config) -> Iterator[str]:
    """Complaints about `batch.stages` but for those about a stage by itself."""
    stages = config.batch.stages
    if not stages:
        return
    for number, stage in enumerate(stages):
        if (stage.from_step is None) == (stage.from_tokens is None):
            found = "neither from_step nor from_tokens" if stage.from_step is None else "both from_step and from_tokens"
            yield f"batch.stages.{number}: found {found}; give one of them"
    if any((stage.from_step is None) == (stage.from_tokens is None) for stage in stages):
        return
    starts = stage_starts(config.batch)
    total = derive_steps(config)
    for number, (former, start) in enumerate(itertools.pairwise(starts)):
        if start.first_step <= former.first_step:
            yield (
                f"batch.stages.{number}: begins at step {start.first_step}, and the stage before at "
                f"{former.first_step}; let each begin after the one before"
            )
        elif start.first_step > total:
            yield (
                f"batch.stages.{number}: begins at step {start.first_step}, and the run ends at {total}; leave it out, "
                "or raise train.steps"
            )
    if config.batch.noise_scale is not None and config.batch.noise_scale.max_batch_size is not None:
        yield "batch.noise_scale.max_batch_size: found beside batch.stages; let one of them decide the batch size"
    if config.data.mix.epochs or config.data.mix.stages or config.data.mix.ranks:
        yield "data.mix: epochs, stages and ranks are for runs of one length; give each of batch.stages its own train"
    sizes = batch_sizes(config.batch)
    if config.batch.ramp is not None and sizes.size(max(1, starts[1].first_step - 1)) < config.batch.global_batch_size:
        yield (
            f"batch.ramp: has not ended when the stage from step {starts[1].first_step} on begins, whose batches have "
            "one size; shorten the ramp, or let the stage begin later"
        )
    for number, stage in enumerate(stages):
        if not any(getattr(stage, name) for name in (*SIZES, "rope", "train")):
            yield f"batch.stages.{number}: changes nothing; give it a seq_len, or leave it out"
        for name in ("fraction", "interleaved") if stage.rope is not None else ():
            now, trained = getattr(stage.rope, name), getattr(config.model.rope, name)
            if now != trained:
                yield (
                    f"batch.stages.{number}.rope.{name}: found {now}, and the weights are trained with {trained}; a "
                    f"stage turns the same channels, at other rates: use {name}={str(trained).lower()}"
                )
    yield from _repeated_names(config)


def _repeated_names(config: Config) -> Iterator[str]:
    """Sources are told apart by their names, over all stages."""
    lists = {"data.train": config.data.train}
    lists |= {f"batch.stages.{n}.train": stage.train or () for n, stage in enumerate(config.batch.stages)}
    repeated = {
        where: name for where, sources in lists.items() for name, n in Counter(map(_name, sources)).items() if n > 1
    }
    for where, name in repeated.items():
        yield f"{where}: several sources are called {name!r}; give each a name of its own, as in `name: web`"
    if not repeated:
        names = Counter(_name(source) for stage in _configs(config) for source in stage.data.train)
        for name in sorted(name for name, n in names.items() if n > 1):
            yield f"batch.stages: {name!r} is a source of two stages; give one of them another name"


def _configs(config: Config) -> Iterator[Config]:
    """Of each stage, made of the one before."""
    groups = [
        group
        if group.schedule is None
        else group.model_copy(update={"schedule": fill_schedule(config, group.schedule)})
        for group in config.optimizer.groups
    ]
    optimizer = config.optimizer.model_copy(update={"groups": tuple(groups)})
    common: dict[str, Section] = {"schedule": fill_schedule(config), "optimizer": optimizer}
    common["train"] = config.train.model_copy(update={"steps": derive_steps(config), "tokens": None})
    longest = config.model.max_positions or longest_sequence(config.batch)
    common["model"] = config.model.model_copy(update={"max_positions": longest})
    common["batch"] = config.batch.model_copy(update={"stages": ()})
    now, sources = config.model_copy(update=common), config.data.train
    taken = {_name(source) for source in sources}
    yield now
    for stage, start in zip(config.batch.stages, stage_starts(config.batch)[1:], strict=True):
        sources = stage.train or sources
        own = [each if each.name and stage.train else _renamed(each, start, taken) for each in sources]
        taken |= {_name(each) for each in own}
        now = _next(now, stage, own)
        yield now


def _next(config: Config, stage: LengthStageConfig, sources: Sequence[SourceConfig]) -> Config:
    """The config of a stage, given that of the one before."""
    given = {name: getattr(stage, name) for name in SIZES}
    batch = config.batch.model_copy(update={"ramp": None, **{k: v for k, v in given.items() if v is not None}})
    model = config.model if stage.rope is None else config.model.model_copy(update={"rope": stage.rope})
    data = config.data.model_copy(update={"train": tuple(sources)})
    return config.model_copy(update={"batch": batch, "model": model, "data": data})


def _renamed(source: SourceConfig, start: StageStart, taken: Collection[str]) -> SourceConfig:
    """A source by a name that it has in no other stage."""
    name = f"{_name(source)}-{start.seq_len}"
    return source.model_copy(update={"name": f"{name}-{start.first_step}" if name in taken else name})


def _name(source: SourceConfig) -> str:
    return source.name or source.path.absolute().name
