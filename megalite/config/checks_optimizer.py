"""What must hold between the settings of `optimizer`, the model's weights, and what is measured of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from megalite.addition import Addition
from megalite.architecture.architecture import Architecture
from megalite.architecture.attentions import ATTENTIONS
from megalite.architecture.costs import MOST_KEPT
from megalite.architecture.weights import is_adapter, weight_table
from megalite.config.engine import choose_engine
from megalite.config.optimizers import OPTIMIZERS, RULES, averages, scales_with_width, settings_read
from megalite.config.schedules import SCHEDULES
from megalite.config.schema import ADAPTED, Config, OptimizerConfig
from megalite.config.sections.optimizer import WeightGroupConfig
from megalite.config.sections.schedule import ScheduleConfig, ShapeConfig
from megalite.config.weight_groups import does_match, group_number, group_of
from megalite.config.wording import or_, unused

CLIPPED = ("attention.q", "attention.k", "attention.q_b", "attention.k_b")
"""What QK-clip scales in a block, of heads of the stream and of heads made of latents."""

MOST_SHOWN = 6
"""Names of weights in a complaint."""


def check_optimizer(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about the optimizer and its groups of weights."""
    optimizer = config.optimizer
    of_some = {key for rule in RULES.values() for key in rule.settings} - settings_read(optimizer.names)
    others = [key for key in OptimizerConfig.model_fields if key in of_some]
    yield from unused(optimizer, others, "optimizer", f"name={or_(optimizer.names)}")
    if not optimizer.noise:
        yield from unused(optimizer, ("noise_decay",), "optimizer", "noise=0")
    yield from _clip(optimizer)
    yield from _decay(config)
    yield from _mup(config)
    yield from _averages(config)
    if optimizer.qk_clip is not None:
        yield from _qk_clip(config, model)
    if optimizer.offload and choose_engine(config) == "deepspeed":
        yield (
            "optimizer.offload: engine=deepspeed keeps masters and state where the weights are; use engine=fsdp2 with "
            "zero_stage=3, engine=native with zero_stage=0 or 1, or offload=false"
        )
    if optimizer.groups:
        yield from _groups(config, model)


def _clip(optimizer: OptimizerConfig) -> Iterator[str]:
    clip = optimizer.clip
    if clip is None:
        return
    if clip.by != "percentile":
        yield from unused(clip, ("window",), "optimizer.clip", f"by={clip.by}")
    elif clip.threshold >= 100:
        yield (
            f"optimizer.clip.threshold: found {clip.threshold:g}, expected a percentile with by=percentile; use a "
            "number below 100, such as 90"
        )
    if clip.by == "group" and not optimizer.groups:
        yield "optimizer.clip.by: group, but optimizer.groups is empty; use clip_grad_norm, or write groups"


def _decay(config: Config) -> Iterator[str]:
    optimizer, decay = config.optimizer, config.optimizer.decay
    if not optimizer.weight_decay and not any(group.weight_decay for group in optimizer.groups):
        yield from unused(decay, type(decay).model_fields, "optimizer.decay", "weight_decay=0")
    if decay.end_scale == 1.0:
        yield from unused(decay, ("shape",), "optimizer.decay", "end_scale=1, where nothing changes")
    if decay.kind == "coupled" and config.model.mup is not None:
        yield (
            "optimizer.decay.kind: coupled decay has no known rule for other widths (model.mup); use decoupled or "
            "independent, or mup=null"
        )


def _mup(config: Config) -> Iterator[str]:
    for name in config.optimizer.names if config.model.mup is not None else ():
        if not scales_with_width(name):
            known = or_(name for name in OPTIMIZERS if scales_with_width(name))
            yield (
                f"model.mup: how {name} scales with the width is not known here; use optimizer.name={known}, or "
                "mup=null"
            )


def _averages(config: Config) -> Iterator[str]:
    """Averages are there in place of a decay."""
    optimizer, falls = config.optimizer, _falls(config.schedule, config.optimizer.lr)
    why = "which lowers the rate, and the averages of {} are there in place of that"
    followed = {("schedule", optimizer.name): config.schedule}
    for number, group in enumerate(optimizer.groups):
        key, name = f"optimizer.groups.{number}.schedule", group.optimizer or optimizer.name
        if group.schedule is not None:
            followed[key, name] = group.schedule
        elif name != optimizer.name and not group.frozen and averages(name) and falls:
            yield (
                f"{key}: null follows schedule.name={config.schedule.name}, {why.format(name)}; give the group a "
                "schedule of its own: {name: constant}, with a warmup"
            )
    for (key, name), shape in followed.items():
        if averages(name) and _falls(shape, optimizer.lr):
            setting, use = ("decay_steps", "null") if shape.name == "constant" else ("name", "constant")
            yield f"{key}.{setting}: found {getattr(shape, setting)}, {why.format(name)}; use {use}, with a warmup"


def _falls(shape: ShapeConfig, peak: float) -> bool:
    """Whether a rate does anything but rise and stay, as far as is known.

    Args:
        peak: of a shape that has none of its own.
    """
    if isinstance(shape, ScheduleConfig) and shape.name == "piecewise":
        peaks = [peak if phase.lr is None else phase.lr for phase in shape.phases[:1]]
        peaks += [phase.lr for phase in shape.phases[1:] if phase.lr is not None]
        return peaks != sorted(peaks) or any(_falls(phase, peak) for phase in shape.phases)
    is_brought = isinstance(SCHEDULES[shape.name].rate, Addition)
    return not is_brought and (shape.name != "constant" or shape.decay_steps is not None)


def _qk_clip(config: Config, model: Architecture) -> Iterator[str]:
    key, optimizer = "optimizer.qk_clip", config.optimizer
    if ATTENTIONS[model.attention].function is not None:
        yield f"{key}: what attention={model.attention}, a plug-in's, makes of queries and keys is not known; use null"
    if model.qk_norm:
        yield f"{key}: with model.qk_norm the size of queries and keys does not depend on their weights; use null"
    if model.attention_soft_cap is not None:
        yield f"{key}: model.attention_soft_cap bounds the logits already; use null for one of the two"
    if model.num_predictions:
        yield f"{key}: the logits of layers that predict further ahead (model.mtp) are not measured; use null"
    if config.parallel.pad_tokens:
        yield f"{key}: parallel.pad_tokens adds tokens whose logits would count, as many as the layout wants; use null"
    frozen = [
        name
        for name in weight_table(model)
        if name.split(".", 2)[-1].rpartition(".")[0] in CLIPPED
        and (group := group_of(name, optimizer)) is not None
        and group.frozen
    ]
    if frozen:
        yield f"{key}: it would change weights that optimizer.groups has frozen, {_some(frozen)}; use null"


def _groups(config: Config, model: Architecture) -> Iterator[str]:
    yield from _of_groups(config.optimizer, model)
    if config.batch.noise_scale is not None and any(group.frozen for group in config.optimizer.groups):
        yield (
            "batch.noise_scale: the gradients of single micro-batches are measured with those of frozen weights "
            "(optimizer.groups, model.lora) among them, those of the batch without; use null, or freeze nothing"
        )


@lru_cache(maxsize=MOST_KEPT)
def _of_groups(optimizer: OptimizerConfig, model: Architecture) -> tuple[str, ...]:
    """Complaints about them, the same for every layout: a search asks for thousands, and experts have many names."""
    return tuple(_problems_of_groups(optimizer, model))


def _problems_of_groups(optimizer: OptimizerConfig, model: Architecture) -> Iterator[str]:
    names = list(weight_table(model))
    if model.lora is not None and not any(map(is_adapter, names)):
        return  # as is said of model.lora.targets
    if model.lora is not None:
        yield from _beside_adapters(optimizer, model, names)
    for number, group in enumerate(optimizer.groups):
        if group == ADAPTED:  # nobody wrote it
            continue
        key = f"optimizer.groups.{number}"
        yield from _patterns(optimizer, group, names, number)
        yield from _settings(optimizer, group, key)
    taken = [group_number(name, optimizer) for name in names]
    if all(number is not None and optimizer.groups[number].frozen for number in taken):
        yield "optimizer.groups: every weight is frozen, and nothing would be learnt; leave some out of the patterns"


def trained_beside_adapters(optimizer: OptimizerConfig, model: Architecture) -> list[str]:
    """Weights that are no adapters and move all the same, in a model with adapters."""
    return [name for name in weight_table(model) if not is_adapter(name) and not _is_frozen(name, optimizer)]


def _beside_adapters(optimizer: OptimizerConfig, model: Architecture, names: list[str]) -> Iterator[str]:
    """An adapter stands in for its matrix: one of the two is trained, and B begins at zero."""
    table = weight_table(model)
    matrices = [
        name
        for name in trained_beside_adapters(optimizer, model)
        if table[name].is_inner and len(table[name].shape) == 2 and table[name].expert is None
    ]
    if matrices:
        yield (
            f"optimizer.groups: model.lora trains adapters in place of matrices, and a group trains {_some(matrices)} "
            "themselves; freeze them, or use model.lora=null"
        )
    if all(_is_frozen(name, optimizer) for name in names if name.endswith(".lora_b")):
        yield (
            "optimizer.groups: every lora_b is frozen, which begins at zero, and nothing would be learnt; leave it out "
            "of the patterns"
        )


def _is_frozen(name: str, optimizer: OptimizerConfig) -> bool:
    group = group_of(name, optimizer)
    return group is not None and group.frozen


def _patterns(optimizer: OptimizerConfig, group: WeightGroupConfig, names: list[str], number: int) -> Iterator[str]:
    key = f"optimizer.groups.{number}.match"
    if not group.match:
        yield f"{key}: empty; name some weights, as in `embedding.*`"
    for pattern in group.match:
        alone = group.model_copy(update={"match": (pattern,)})
        found = [name for name in names if does_match(name, alone)]
        if not found:
            shown = ", ".join(dict.fromkeys(map(_any_block, names)))
            yield f"{key}: no weight has a name like {pattern!r}; there are {shown}"
        elif all((group_number(name, optimizer) or 0) < number for name in found):
            earlier = {group_number(name, optimizer) for name in found}
            yield (
                f"{key}: all that {pattern!r} has ({_some(found)}) belongs to {or_(sorted(map(str, earlier)))} of the "
                "groups before it, the first that has a weight; write this group before it"
            )

    for pattern in group.but:
        named, whole = group.model_copy(update={"match": (pattern,), "but": ()}), group.model_copy(update={"but": ()})
        if not any(does_match(name, named) and does_match(name, whole) for name in names):
            yield (
                f"optimizer.groups.{number}.but: no weight of match has a name like {pattern!r}, and nothing would be "
                "taken out; leave it out, or correct it"
            )


def _any_block(name: str) -> str:
    """`blocks.*.attention.q.weight`"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more


def _settings(optimizer: OptimizerConfig, group: WeightGroupConfig, key: str) -> Iterator[str]:
    own = [name for name in type(group).model_fields if name not in ("match", "but", "frozen")]
    if group.frozen:
        yield from unused(group, own, key, "frozen=true")
    elif all(getattr(group, name) == type(group).model_fields[name].default for name in own):
        yield f"{key}: it sets nothing; leave it out, or set {or_([*own, 'frozen'])}"
    by = None if optimizer.clip is None else optimizer.clip.by
    if by in (None, "percentile"):
        because = "optimizer.clip=null" if by is None else "optimizer.clip.by=percentile, of the whole gradient"
        yield from unused(group, ("clip_threshold",), key, because)
