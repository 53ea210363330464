"""What to change in a config that does not fit: each change is tried, and said only where it helps."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.config.sections.train import RecomputeRule
from megalite.config.validate import validate
from megalite.config.wording import or_
from megalite.errors import ConfigError, UserError
from megalite.planner.estimate import Estimate, estimate, usable_host_memory
from megalite.planner.layouts import LEAST_TOKENS_OF_CP, as_yaml, first_blocks
from megalite.planner.machines import Machine
from megalite.planner.memory import on_device
from megalite.planner.search import Search, search

MOST_RANKS = 16_384
"""Up to which more are tried, and twice as many as there are in any case."""
FEW_BITS = {"adamw": "adamw8bit", "lion": "lion8bit", "muon": "muon8bit"}
"""Optimizers, and those that keep the same state in 8 bits a number."""

OFFLOADED = ("optimizer", "offload", True)


@dataclass(frozen=True)
class Change:
    """Some settings: section, key and value of each."""

    settings: tuple[tuple[str, str, bool | int | str | tuple[RecomputeRule, ...]], ...]

    def applied_to(self, config: Config) -> Config:
        """The config with them."""
        for section, key, value in self.settings:
            changed = getattr(config, section).model_copy(update={key: value})
            config = config.model_copy(update={section: changed})
        return config

    @property
    def overrides(self) -> tuple[str, ...]:
        """As the command line takes them."""
        return tuple(f"{section}.{key}={as_yaml(value)}" for section, key, value in self.settings)

    def __str__(self) -> str:
        """The same, as a shell takes them."""
        return shlex.join(self.overrides)


def best_or_offloaded(
    found: Search, config: Config, world_size: int, machine: Machine, vocab_size: int | None, *, top: int
) -> tuple[list[Estimate], list[str]]:
    """The best layouts of a search; where none fits, those with the optimizer in the host's memory, and why.

    Raises:
        UserError: none fits with it either.
    """
    if found.best:
        return list(found.best), []
    away, why = Change((OFFLOADED,)), refusal(found, config, world_size, machine, vocab_size)
    if away not in _of_any_layout(config, machine):
        raise why
    best = search(away.applied_to(config), world_size, machine, top=top, vocab_size=vocab_size).best
    if not best:
        raise why
    shown = [replace(each, overrides=(*each.overrides, *away.overrides)) for each in best]
    return shown, [f"{why}; what is shown has {away}"]


def refusal(
    found: Search,
    config: Config,
    world_size: int,
    machine: Machine,
    vocab_size: int | None,
    *,
    option: str = "--world-size",
) -> UserError:
    """What is said where a search has found nothing that fits, or nothing at all.

    Args:
        option: of the verb, that says how many ranks there are.
    """
    if found.complaint:
        return UserError(f"no layout of engine native or fsdp2 is legal on so many ranks: {found.complaint}")
    if found.smallest is None:
        return UserError(
            "no layout is legal on so many ranks, of those that are looked at: dp divides batch.global_batch_size, a "
            f"pipeline has a micro-batch for each stage, and cp leaves a rank {LEAST_TOKENS_OF_CP:,} tokens (a quarter "
            f"where sequences are few); change {option}, or the batch, or judge a layout of your own with megalite "
            "plan CONFIG --as-is"
        )

    def has_layout(config: Config, ranks: int = world_size) -> bool:
        return bool(search(config, ranks, machine, top=1, vocab_size=vocab_size).best)

    changes, more = list(_of_any_layout(config, machine)), _more_ranks(world_size)
    helps = _that_help(config, changes, has_layout)
    if ranks := next((each for each in more if has_layout(config, each)), None):
        helps.insert(0, f"{option} {ranks}")
    tried = [f"up to {more[-1]:,} ranks", *map(str, changes)]
    otherwise = (
        f"nor does it with {or_(tried)}: use a machine with more memory, a larger batch, which more ranks can "
        "share, or a smaller model"
    )
    taken, usable = f"{max(found.smallest.memory) / 2**30:.1f} GiB of a rank", float(max(0, found.usable))
    if max(found.smallest.memory) <= usable:
        taken, usable = f"{max(found.smallest.host) / 2**30:.1f} GiB a rank of its node's", usable_host_memory(machine)
    return UserError(
        f"no layout fits: the smallest takes {taken} ({shlex.join(found.smallest.overrides)}), and "
        f"{usable / 2**30:.1f} can be used; " + (f"it fits with {or_(helps)}" if helps else otherwise)
    )


def what_helps(config: Config, world_size: int, machine: Machine, vocab_size: int | None) -> str:
    """What to change in a config whose own layout does not fit, as a sentence."""
    config = on_device(config, machine.device_type)

    def fits(config: Config, ranks: int = world_size) -> bool:
        try:
            validate(config, ranks)
        except ConfigError:
            return False
        return estimate(config, ranks, machine, vocab_size=vocab_size).fits

    helps = _that_help(config, [*_of_own_layout(config, machine), *_of_any_layout(config, machine)], fits)
    if config.train.recompute == "none" and "train.recompute=full" in helps:
        plan = make_plan(config, world_size, vocab_size)
        fullest = max(len(plan.blocks_of(stage)) for stage in range(plan.pp))
        helps[:0] = _fewest_again(config, fullest + (1 if plan.model.num_predictions else 0), fits)
    if more := _more_replicas(config, world_size, fits):
        helps.insert(0, more)
    others = "without --as-is other layouts are looked at"
    return f"this does not fit; it would with {or_(helps)}; {others}" if helps else f"this does not fit; {others}"


def _fewest_again(config: Config, num_blocks: int, fits: Callable[[Config], bool]) -> list[str]:
    """The fewest blocks of each stage that have to be made again, where so many, which are all, are enough; nothing
    where it takes all."""
    least, most = 1, num_blocks
    while least < most:
        middle = (least + most) // 2
        if fits(_with_first_again(middle).applied_to(config)):
            most = middle
        else:
            least = middle + 1
    return [str(_with_first_again(most))] * (most < num_blocks)


def _with_first_again(count: int) -> Change:
    return Change((("train", "recompute_layers", first_blocks(count)),))


def _more_replicas(config: Config, world_size: int, fits: Callable[[Config, int], bool]) -> str:
    """The fewest ranks, doubled at a time, on which a layout's ZeRO stage has divided enough; empty for none."""
    dp = config.parallel.dp
    for ranks in _more_ranks(world_size):
        change = Change((("parallel", "dp", ranks // world_size * dp),) if dp is not None else ())
        if fits(change.applied_to(config), ranks):
            return f"--world-size {ranks} {change}".rstrip()
    return ""


def _more_ranks(world_size: int) -> list[int]:
    """Twice as many, and again and again."""
    found = [2 * world_size]
    while 2 * found[-1] <= MOST_RANKS:
        found.append(2 * found[-1])
    return found


def _that_help(config: Config, changes: list[Change], fits: Callable[[Config], bool]) -> list[str]:
    """Those of the changes with which a config fits, each by itself; all at once where none does."""
    helps = [str(change) for change in changes if fits(change.applied_to(config))]
    together = Change(tuple(setting for change in changes for setting in change.settings))
    return helps or [str(together)] * (len(changes) > 1 and fits(together.applied_to(config)))


def _of_any_layout(config: Config, machine: Machine) -> Iterator[Change]:
    """What a search leaves as it is."""
    if config.precision.dtype == "fp32" and "bf16" in machine.flops:
        exact = (("precision", "products", "fp32"),) if config.precision.products != "fp32" else ()
        yield Change((("precision", "dtype", "bf16"), *exact))
    if config.optimizer.offload and machine.host_memory_gib is not None:
        yield Change((("optimizer", "offload", False),))
    if not config.optimizer.offload and machine.host_link is not None:
        yield Change((OFFLOADED,))
    if few := FEW_BITS.get(config.optimizer.name):
        yield Change((("optimizer", "name", few),))


def _of_own_layout(config: Config, machine: Machine) -> Iterator[Change]:
    """What a search would change."""
    if config.train.recompute != "full" and not config.train.recompute_layers:
        yield Change((("train", "recompute", "full"),))
    elif not config.train.offload_activations and machine.host_link is not None and not config.train.cuda_graphs:
        yield Change((("train", "offload_activations", True),))
    if config.batch.micro_batch_size > 1:
        yield Change((("batch", "micro_batch_size", 1),))
