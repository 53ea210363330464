"""The best layouts of a model on so many ranks of a machine.

All layouts are put in order by a lower bound of their time, which is quick: the work of a stage, and the bubble that no
order of passes avoids. What cannot fit, by a lower bound of its memory, is passed over. The others are judged one by
one, memory, time and legality, until no layout that is left could be among the best.

Of layouts that share ranks alike, and differ in micro-batch, schedule or recomputation, one is shown: of those that are
as quick as the quickest, as far as this clock can tell, the one that takes the least memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter

from megalite.config.fill import fill
from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.config.stream import stream_tokens
from megalite.config.trained import trained_parts
from megalite.config.validate import validate
from megalite.engine.footprint import footprint
from megalite.errors import ConfigError
from megalite.planner.block_memory import block_activations, is_compiled, recomputed
from megalite.planner.estimate import Estimate, estimate, estimate_if_fits, usable_host_memory, usable_memory
from megalite.planner.holdings import numbers_by_stage
from megalite.planner.layouts import Candidate, Mesh, layouts
from megalite.planner.machines import Machine
from megalite.planner.memory import on_device
from megalite.planner.practice import OURS, Practice
from megalite.planner.seconds import micro_batch_seconds

MicroBatches = dict[tuple[int | str, ...], tuple[float, float]]
"""Seconds of one through the whole model, and bytes that are kept of it, by what sets them apart: neither ranks nor the
size of a batch."""


@dataclass(frozen=True)
class Search:
    """What was found."""

    best: tuple[Estimate, ...]
    """Those that fit, one of each mesh, the quickest first."""
    smallest: Estimate | None
    """Where none fits, the one that lacks the fewest bytes; None where no layout is legal."""
    num_layouts: int
    """That were looked at."""
    complaint: str = ""
    """Why a layout was refused, where all were."""
    usable: int = 0
    """Bytes of a rank that a layout may take."""


def search(
    config: Config,
    world_size: int,
    machine: Machine,
    *,
    top: int,
    vocab_size: int | None = None,
    practice: Practice = OURS,
    known: MicroBatches | None = None,
) -> Search:
    """The layouts of a config that take the least time on so many ranks.

    Args:
        config: its own layout does not matter.
        top: layouts to find, each of another mesh.
        vocab_size: where the config takes its tokenizer's.
        practice: of the software, which has these layouts alone.
        known: what former searches of this model on this machine have worked out, to be added to.

    Raises:
        UserError: the machine has no units for the config's format.
    """
    config = on_device(config, machine.device_type)
    model = fill(config, vocab_size)
    bounds, most = Bounds(config, machine, vocab_size, practice, known), usable_memory(machine)
    legal = (each for each in layouts(config, model, world_size, machine, practice) if not bounds.is_repeated(each))
    found = sorted(((bounds.seconds(each), each) for each in legal), key=itemgetter(0))
    best = Quickest(top)
    for seconds, layout in found:
        if seconds >= best.limit * (1 + EQUAL):
            break
        if seconds >= best.limit_of(layout.mesh) or bounds.memory(layout) > most:
            continue
        judged = _judge(config, layout, world_size, machine, vocab_size, must_fit=True, practice=practice)
        if isinstance(judged, Estimate):
            best.add(layout.mesh, judged)
    if chosen := best.chosen():
        return Search(chosen, None, len(found))
    complaint, smallest = "", list[Estimate]()
    for layout in sorted((each for _, each in found), key=bounds.memory):
        judged = _judge(config, layout, world_size, machine, vocab_size, practice=practice)
        assert judged is not None, "it need not fit"
        if isinstance(judged, ConfigError):
            complaint = complaint or judged.problems[0]
        else:
            smallest.append(judged)
        if len(smallest) == TRIED_FOR_SMALLEST:
            break
    of_host = usable_host_memory(machine)
    least = min(smallest, key=lambda each: max(max(each.memory) - most, max(each.host) - of_host), default=None)
    return Search((), least, len(found), "" if least else complaint, int(most))


TRIED_FOR_SMALLEST = 64
"""Layouts that take little by their bounds, of which the least is said where none fits."""


def _judge(
    base: Config,
    layout: Candidate,
    world_size: int,
    machine: Machine,
    vocab_size: int | None,
    *,
    must_fit: bool = False,
    practice: Practice,
) -> Estimate | ConfigError | None:
    """A layout judged, or why it is refused; None for one that does not fit and must."""
    config = layout.applied_to(base)
    try:
        validate(config, world_size)
    except ConfigError as error:
        return error
    judge = estimate_if_fits if must_fit else estimate
    return judge(
        config, world_size, machine, vocab_size=vocab_size, overrides=layout.overrides(base), practice=practice
    )


EQUAL = 0.005
"""Of a step: layouts that are nearer to each other are equally quick."""


class Quickest:
    """The quickest layouts of the meshes that are quickest."""

    def __init__(self, top: int):
        self._top = top
        self._found: dict[Mesh, list[Estimate]] = {}
        """All that are equal to the quickest of their mesh, it first."""

    @property
    def limit(self) -> float:
        """Seconds that a layout of another mesh has to stay below."""
        quickest = sorted(each[0].seconds for each in self._found.values())
        return quickest[self._top - 1] if len(quickest) >= self._top else inf

    def limit_of(self, mesh: Mesh) -> float:
        """Seconds that a layout of a mesh has to stay below."""
        known = self._found.get(mesh)
        return self.limit if known is None else min(self.limit, known[0].seconds) * (1 + EQUAL)

    def add(self, mesh: Mesh, layout: Estimate) -> None:
        """One that fits."""
        all_of_mesh = sorted([*self._found.get(mesh, ()), layout], key=lambda each: each.seconds)
        equal = all_of_mesh[0].seconds * (1 + EQUAL)
        self._found[mesh] = [each for each in all_of_mesh if each.seconds <= equal]

    def chosen(self) -> tuple[Estimate, ...]:
        """One of each of the quickest meshes, the quickest first."""
        meshes = sorted(self._found.values(), key=lambda each: each[0].seconds)[: self._top]
        return tuple(sorted((min(each, key=_least) for each in meshes), key=lambda each: each.seconds))


def _least(layout: Estimate) -> tuple[int, float]:
    return max(layout.memory), layout.seconds


class Bounds:
    """What layouts take at least."""

    def __init__(
        self,
        base: Config,
        machine: Machine,
        vocab_size: int | None,
        practice: Practice,
        known: MicroBatches | None = None,
    ):
        self._base, self._machine, self._vocab_size, self._practice = base, machine, vocab_size, practice
        self._has_frozen = any(group.frozen for group in base.optimizer.groups)
        self._of_micro_batches: MicroBatches = {} if known is None else known
        self._of_engines: dict[tuple[int, ...], tuple[int, int]] = {}
        self._compiles: bool | None = None
        """Of all layouts alike: steps, and FLOPs a rank, are the same."""

    def seconds(self, layout: Candidate) -> float:
        """Of a step."""
        work, _ = self._of_micro_batch(layout)
        count = self._base.batch.global_batch_size // (layout.dp * layout.micro_batch_size)
        hidden = UNEVEN.get(layout.schedule, 0.0) * layout.pp / count if layout.pp > 1 else 0.0
        return work / layout.pp * (count + UNAVOIDABLE[layout.schedule](layout)) * (1 - hidden)

    def memory(self, layout: Candidate) -> float:
        """Bytes of a rank: what the engine keeps of a stage of mean size, what it has of a block at work, and what the
        first stage keeps of the micro-batches under way, which is a share of the blocks of as many."""
        _, kept = self._of_micro_batch(layout)
        lasting, at_work = self._of_engine(layout)
        is_away = layout.offloads or (layout.pp > 1 and self._has_frozen)  # of which a first stage may keep nothing
        first = 0.0 if is_away else kept * (1.0 if layout.pp == 1 else SHARE_OF_FIRST)
        return lasting / layout.pp + at_work + first

    def is_repeated(self, layout: Candidate) -> bool:
        """Whether it is another one in other words: compiled blocks do under `none` what `selective` says."""
        if layout.recompute == "selective" and self._compiles is None:
            config, ranks = layout.applied_to(self._base), layout.dp * layout.cp * layout.tp * layout.pp
            self._compiles = is_compiled(config, make_plan(config, ranks, self._vocab_size))
        return layout.recompute == "selective" and bool(self._compiles)

    def _of_micro_batch(self, layout: Candidate) -> tuple[float, float]:
        """Seconds through the whole model, and bytes kept of it."""
        shared = layout.tp, layout.cp, layout.ep, layout.divides_sequences
        key = (*shared, layout.micro_batch_size, layout.recompute, layout.offloads)
        if key not in self._of_micro_batches:
            alone = replace(layout, pp=1, dp=layout.ep, schedule="1f1b", chunks=None, divides_weights=False, copies=1)
            config = alone.applied_to(self._base)
            plan = make_plan(config, alone.dp * alone.cp * alone.tp, self._vocab_size)
            passed = range(trained_parts(plan.model, config.optimizer).first, plan.model.num_layers)
            kept = sum(block_activations(config, plan, passed, recomputed(config, plan)))
            tokens = stream_tokens(config) // plan.cp
            seconds = micro_batch_seconds(config, plan, self._machine, self._practice)
            self._of_micro_batches[key] = seconds, float(kept * tokens)
        return self._of_micro_batches[key]

    def _of_engine(self, layout: Candidate) -> tuple[int, int]:
        """Bytes of the whole model's weights, gradients and states on one rank, and of a block at work."""
        is_single = self._base.batch.global_batch_size == layout.dp * layout.micro_batch_size
        key = layout.tp, layout.cp, layout.ep, layout.dp, layout.divides_weights, layout.copies, is_single
        if key not in self._of_engines:
            config = replace(layout, pp=1, schedule="1f1b", chunks=None).applied_to(self._base)
            plan = make_plan(config, layout.dp * layout.cp * layout.tp, self._vocab_size)
            held = footprint(config, plan, numbers_by_stage(config, plan)[0])
            lasting = held.weights + held.gradients + held.optimizer - held.late_gradients
            self._of_engines[key] = lasting, held.in_blocks.first
        return self._of_engines[key]


SHARE_OF_FIRST = 0.8
"""Of an even share of the blocks, what a pipeline's first stage has at least: others have less, for the head's sake."""

UNAVOIDABLE: dict[str, Callable[[Candidate], float]] = {
    "1f1b": lambda layout: layout.pp - 1,
    "interleaved": lambda layout: (layout.pp - 1) / (layout.chunks or 1),
    "zb-h1": lambda layout: (layout.pp - 1) / 3,
    "zb-v": lambda layout: 0.0,
    "dualpipe-v": lambda layout: 0.0,
}
"""Work of a micro-batch in which stages of a schedule wait, whatever else they do, if all have as much of it."""
UNEVEN = {"1f1b": 0.12, "interleaved": 0.12}
"""Of a step whose first stage has more to do than the others, what it hides of that wait, where there are no more
micro-batches than stages; of more so much less."""
