"""Options of `megalite plan` about nodes that fail, and what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from megalite.errors import UserError

if TYPE_CHECKING:
    from megalite.config.schema import Config
    from megalite.planner.goodput import Faults, UnderFailures
    from megalite.planner.machines import Machine
    from megalite.planner.whole_run import WholeRun

RESTART_SECONDS = 270.0
"""Where nothing else is said; docs/plan.md has what ours were measured to be."""
NAMES = "--save-seconds, --detect-seconds and --restart-seconds"

Failures = Annotated[
    float | None,
    typer.Option(
        min=1e-9, max=1e6, help="Of a node, a day: shows how often to save, and what is kept.", show_default=False
    ),
]
SaveSeconds = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1e6, help="That a save holds training up.", show_default="a node's share of it at 2.3 GB/s"
    ),
]
DetectSeconds = Annotated[
    float | None,
    typer.Option(min=0.0, max=1e6, help="From a failure until it is noticed.", show_default="slurm.beat_seconds"),
]
RestartSeconds = Annotated[
    float | None,
    typer.Option(min=0.0, max=1e6, help="From there until training goes on.", show_default=str(RESTART_SECONDS)),
]


def given_faults(
    config: Config, often: float | None, save: float | None, detect: float | None, restart: float | None
) -> Faults | None:
    """What was said of failures, and what is taken where nothing was; None where nothing fails.

    Raises:
        UserError: seconds are given and no failures.
    """
    from megalite.planner.goodput import Faults

    if often is None and not (save is None and detect is None and restart is None):
        raise UserError(f"{NAMES} have no effect without --failures; give it, or none of them")
    if often is None:
        return None
    detect = config.slurm.beat_seconds if detect is None else detect
    return Faults(often, detect, RESTART_SECONDS if restart is None else restart, save)


def risks_of(
    given: Faults | None, run: WholeRun, config: Config, ranks: int, machine: Machine, vocab_size: int | None
) -> tuple[UnderFailures | None, list[str]]:
    """What failures make of a run, and what is taken of a save where nothing was said of it."""
    from megalite.config.plan import make_plan
    from megalite.planner.goodput import said_of_save, share_of_node, under_failures

    if given is None:
        return None, []
    share = share_of_node(config, make_plan(config, ranks, vocab_size), machine)
    notes = [said_of_save(share)] if given.save is None else []
    return under_failures(run, ranks, machine, given, share), notes
