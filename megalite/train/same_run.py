"""That all ranks of a run train the same one, seen before they build anything.

Ranks that torchrun, srun or mpirun have started read config, data, plug-ins and a pipeline's schedule each on its own
node. Where one finds an older copy, ranks wait for each other for ever, or train something that nobody asked for.

What they compute on is compared, too. Machines of unlike kind give other last digits: that is said, and so is a run
that goes on elsewhere. Within a tensor-parallel group it is refused: its ranks compute the same numbers each by itself
(norms, which experts a token goes to) and must have them alike.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from megalite import __version__
from megalite.config.schema import Config
from megalite.data.samples import Samples
from megalite.errors import UserError
from megalite.monitor.recorder import Recorder
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import from_all
from megalite.plugins import loaded_plugins
from megalite.train.preflight import ReadyStage

NUM_NAMED = 5
"""Differences that a message names."""


@dataclass(frozen=True)
class RankMachine:
    """Where a rank computes."""

    host: str
    kind: str
    """Its GPU, or its class of CPU, with what multiplies there once that is chosen."""


def check_same_run(
    config: Config, stages: Sequence[ReadyStage], valid_sets: Mapping[str, Samples], world: Axis, kind: str
) -> None:
    """Compare what the ranks are about to train. Collective.

    Args:
        world: all ranks.
        kind: of this rank's machine.

    Raises:
        UserError: on all ranks: they differ; it says in what.
    """
    mine = _facts(config, stages, valid_sets)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    said = from_all((digest, RankMachine(socket.gethostname(), kind)), world)
    if len({each for each, _ in said}) > 1:
        raise UserError(_differences(from_all((socket.gethostname(), mine), world)))
    check_groups([machine for _, machine in said], stages[0].plan.tp)


def check_groups(machines: Sequence[RankMachine], tp: int) -> None:
    """Raises UserError: a tensor-parallel group has machines of unlike kind.

    Args:
        machines: in the order of ranks, of which tensor-parallel groups are runs.
    """
    for first in range(0, len(machines), tp):
        mine = machines[first]
        for rank in range(first + 1, first + tp):
            other = machines[rank]
            if other.kind != mine.kind:
                raise UserError(
                    f"parallel.tp={tp}: ranks of a tensor-parallel group compute the same numbers each by itself, and "
                    f"need machines of one kind: rank {first} on {mine.host} has {mine.kind}, rank {rank} on "
                    f"{other.host} {other.kind}; start each group on machines of one kind, or use parallel.tp=1"
                )


def find_machines(kind: str, world: Axis) -> list[RankMachine]:
    """Of all ranks, in their order. Collective.

    Args:
        kind: of this rank's machine, with what multiplies there.
    """
    return from_all(RankMachine(socket.gethostname(), kind), world)


def counted(machines: Sequence[RankMachine]) -> dict[str, int]:
    """Ranks by the kind of their machine."""
    return dict(Counter(each.kind for each in machines))


def tell_machines(recorder: Recorder, machines: Sequence[RankMachine], step: int) -> None:
    """Write down and say where machines are of unlike kind, or none that the attempt before had."""
    kinds = counted(machines)
    if len(kinds) > 1:
        first = machines[0]
        rank, other = next((rank, each) for rank, each in enumerate(machines) if each.kind != first.kind)
        why = (
            f"machines of unlike kind: rank 0 on {first.host} has {first.kind}, rank {rank} on {other.host} "
            f"{other.kind} ({_in_words(kinds)}); last digits are others than on machines of one kind, and all wait for "
            "the slowest (batch.shares gives it less)"
        )
        recorder.note("machines_differ", step, why=why)
    former = recorder.former_start.get("machines")
    if step and isinstance(former, dict) and former.keys() != kinds.keys():
        why = (
            f"this run goes on with {_in_words(kinds)}, it had {_in_words(former)} before; it is equal to what that "
            "would have computed to float tolerance, no longer to the last bit"
        )
        recorder.note("machines_changed", step, why=why)


def _in_words(kinds: Mapping[str, int]) -> str:
    return "; ".join(f"{count} x {kind}" for kind, count in kinds.items())


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
