"""That all ranks of a run train the same one, seen before they build anything.

Ranks that torchrun, srun or mpirun have started read config, data, plug-ins and a pipeline's schedule each on its own
node. Where one finds an older copy, ranks wait for each other for ever, or train something that nobody asked for.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from megalite import __version__
from megalite.config.schema import Config
from megalite.data.samples import Samples
from megalite.errors import UserError
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import from_all
from megalite.plugins import loaded_plugins
from megalite.train.preflight import ReadyStage

NUM_NAMED = 5
"""Differences that a message names."""


def check_same_run(
    config: Config, stages: Sequence[ReadyStage], valid_sets: Mapping[str, Samples], world: Axis
) -> None:
    """Compare what the ranks are about to train. Collective.

    Args:
        world: all ranks.

    Raises:
        UserError: on all ranks: they differ; it says in what.
    """
    mine = _facts(config, stages, valid_sets)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(from_all(digest, world))) == 1:
        return
    raise UserError(_differences(from_all((socket.gethostname(), mine), world)))


def _facts(config: Config, stages: Sequence[ReadyStage], valid_sets: Mapping[str, Samples]) -> dict[str, Any]:
    """By name: settings under their own, then what they have become here."""
    facts = dict(_flat(config.model_dump(mode="json")))
    facts |= {"megalite's version": __version__, "torch's version": version("torch")}
    facts |= {f"the plug-in {each.name}": each.digest for each in loaded_plugins()}
    facts |= {f"the validation data {name}": each.fingerprint for name, each in valid_sets.items()}
    for stage in stages:
        where = f" from step {stage.plan.first_step} on" if stage.plan.first_step > 1 else ""
        facts |= {f"the training data{where}": stage.samples.fingerprint}
        facts |= {f"{name} of the plan{where}": fact for name, fact in stage.plan.to_dict().items()}
    return facts


def _flat(settings: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Settings by their dotted names."""
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        pairs += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(f"{before}{key}", value)]
    return pairs


def _differences(said: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The first rank that has another run than rank 0, and what is other there."""
    first_host, first = said[0]
    others = [rank for rank, (_, facts) in enumerate(said) if facts != first]
    host, facts = said[others[0]]
    names = [name for name in {**first, **facts} if first.get(name) != facts.get(name)]
    shown = "; ".join(f"{name}: {_short(first.get(name))} and {_short(facts.get(name))}" for name in names[:NUM_NAMED])
    more = f"; and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    count = f" ({len(others)} of {len(said)} ranks differ from rank 0)" if len(others) > 1 else ""
    return (
        f"ranks have not the same run: rank 0 on {first_host} and rank {others[0]} on {host} have {shown}{more}"
        f"{count}; give all nodes the same files, or one folder that they share"
    )


def _short(fact: object) -> str:
    text = json.dumps(fact)
    return text if len(text) <= 60 else f"{text[:57]}..."
