"""The best size and length for a budget: of FLOPs, or of hours on a machine by the planner's seconds.

For every legal width the budget buys some number of tokens; the law says the loss, and the width of the least loss is
the answer. FLOPs are those of the real models, attention and head included, and hours those of real layouts, so both
differ a little from the closed form of 6 N D (`law.Law.optimum`), which gives the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigError, UserError
from megalite.ladder.law import Interval, Law
from megalite.ladder.rule import Size, SizeFamily

if TYPE_CHECKING:
    from megalite.planner.machines import Machine

MOST_TIMES_WIDER, WIDTHS_TRIED = 4096, 400
FAR = 10.0
"""Times the largest or longest run of a ladder, beyond which its law is a guess."""


@dataclass(frozen=True)
class Choice:
    """A size with the tokens that a budget buys for it."""

    size: Size
    num_tokens: float
    loss: float
    """By the law."""


@dataclass(frozen=True)
class Best:
    """What to train for a budget."""

    budget: str
    """In words."""
    flops: float
    """That it comes to, at the best size."""
    chosen: Choice
    interval: Interval
    """Of the loss of such a run."""
    others: tuple[Choice, ...]
    """All widths that were looked at, narrow to wide."""
    steps: int
    closed_form: dict[str, Interval]
    """N, D and tokens a parameter of 6 N D FLOPs."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        size = self.chosen.size
        return {
            "budget": self.budget,
            "flops": self.flops,
            "width": size.width,
            "layers": size.layers,
            "parameters": size.num_parameters,
            "tokens": self.chosen.num_tokens,
            "steps": self.steps,
            "loss": vars(self.interval),
            "settings": size.settings,
            "closed_form": {name: vars(each) for name, each in self.closed_form.items()},
        }


def best_for_flops(family: SizeFamily, law: Law, flops: float) -> Best:
    """The size and length of the least loss for so many FLOPs, forward and backward.

    Raises:
        UserError: they do not buy a step of any size.
    """
    return _best(family, law, lambda size: flops / size.flops_per_token, f"{flops:.3g} FLOPs")


def best_for_hours(family: SizeFamily, law: Law, hours: float, machine_name: str, world_size: int) -> Best:
    """The same for hours on ranks of a machine, in the config's own layout and micro-batch.

    Raises:
        UserError: the machine is unknown, or the hours do not buy a step of any size.
    """
    from megalite.config.validate import validate
    from megalite.planner.estimate import estimate

    machine = open_machine(family, machine_name, world_size)

    def tokens(size: Size) -> float:
        try:
            validate(family.with_size(size), world_size)
        except ConfigError:
            return 0.0  # heads that tp does not divide, and the like
        found = estimate(family.with_size(size), world_size, machine, vocab_size=family.vocab_size)
        return hours * 3600 * found.tokens_per_second if found.fits else 0.0

    ranks = f"{world_size} rank{'s' * (world_size > 1)} of {machine_name}"
    return _best(family, law, tokens, f"{hours:g} hours on {ranks}")


def open_machine(family: SizeFamily, machine_name: str, world_size: int) -> Machine:
    """The machine that hours are spent on.

    Raises:
        UserError: it is unknown, or the config is none for so many ranks.
    """
    from megalite.config.validate import validate
    from megalite.planner.machines import load_machine

    machine = load_machine(machine_name)
    validate(family.config, world_size)
    return machine


def _best(family: SizeFamily, law: Law, tokens_for: Callable[[Size], float], budget: str) -> Best:
    found: list[Choice] = []
    for size in _sizes(family):
        tokens = tokens_for(size)
        if tokens >= family.tokens_per_step:
            found.append(Choice(size, tokens, law.loss(size.num_parameters, tokens)))
        if found and found[-1].loss > 1.5 * min(each.loss for each in found):
            break
    if not found:
        raise UserError(f"{budget}: not a step of {family.tokens_per_step:,} tokens, of any size; give more")
    chosen = min(found, key=lambda each: each.loss)
    flops = chosen.num_tokens * chosen.size.flops_per_token
    interval = law.interval(chosen.size.num_parameters, chosen.num_tokens)
    steps = family.steps(chosen.num_tokens)
    return Best(budget, flops, chosen, interval, tuple(found), steps, law.optimum(flops))


def _sizes(family: SizeFamily) -> Iterator[Size]:
    """Legal widths from the narrowest on: all of them at first, then some 1 % apart."""
    width, granule = family.granule, family.granule
    for _ in range(WIDTHS_TRIED):
        if width > MOST_TIMES_WIDER * family.base.hidden_size:
            return
        yield family.size(width)
        width = max(width + granule, round(width * 1.02 / granule) * granule)


def far_off(best: Best, largest: float, longest: float) -> str | None:
    """A warning where the answer lies far beyond what has been trained."""
    size, tokens = best.chosen.size.num_parameters / largest, best.chosen.num_tokens / longest
    if size <= FAR and tokens <= FAR:
        return None
    return f"{size:.2g} times the largest model and {tokens:.2g} times the longest run of the ladder: a guess"
