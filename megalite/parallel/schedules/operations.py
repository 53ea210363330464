"""The words of a pipeline schedule.

The list of a model's layers is cut into *chunks*, numbered from the first layers to the last; a rank holds one or more
of them. A micro-batch passes forward through all chunks, and back through them:

    F  forward     B  backward, whole     I  backward, for the chunk's input alone     W  for its weights alone

B is I and W in one. Splitting them lets a rank hand on the input's gradient first, and make the weights' when it would
otherwise wait (Qi et al. 2023, Zero Bubble Pipeline Parallelism).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megalite.errors import UserError

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

PlacementKind = Literal["loop", "v"]


class ScheduleError(UserError):
    """An order of passes that cannot run."""


class Operation(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    kind: Kind
    chunk: int
    """From 0, the first layers, to the model's last."""
    micro_batch: int
    """From 0."""

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class ChunkPlacement:
    """Which rank holds which chunk."""

    ranks: tuple[int, ...]
    """The rank along the pipeline, chunk by chunk."""

    @cached_property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @property
    def num_chunks(self) -> int:
        return len(self.ranks)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the model's order."""
        return tuple(chunk for chunk, holder in enumerate(self.ranks) if holder == rank)


def place(kind: PlacementKind, pp: int, chunks_per_rank: int) -> ChunkPlacement:
    """Chunks in rounds over the ranks: `loop` begins each round at rank 0, `v` goes back the way it came.

    loop, 4 ranks, 2 chunks    0 1 2 3 0 1 2 3
    v                          0 1 2 3 3 2 1 0
    """
    there = list(range(pp))
    rounds = [there if kind == "loop" or number % 2 == 0 else there[::-1] for number in range(chunks_per_rank)]
    return ChunkPlacement(tuple(rank for each in rounds for rank in each))


Codes = tuple[int, ...]
"""Of a rank's passes in order, kind and chunk of each, as `cost_index` numbers them."""


@dataclass(frozen=True)
class PipelineSchedule:
    """What every rank of a pipeline does in one step, in order."""

    placement: ChunkPlacement
    num_micro_batches: int
    orders: tuple[tuple[Operation, ...], ...]
    """The passes of each rank."""

    @cached_property
    def wiring(self) -> Wiring:
        """What each pass waits for.

        Raises:
            ScheduleError: ranks wait for each other for ever; it says where each stands.
        """
        return _wire(self)

    @cached_property
    def codes(self) -> tuple[Codes, ...]:
        """The passes of each rank as numbers."""
        index = {(kind, chunk): cost_index(kind, chunk) for kind in KINDS for chunk in range(self.placement.num_chunks)}
        return tuple(tuple([index[kind, chunk] for kind, chunk, _ in order]) for order in self.orders)

    @cached_property
    def is_split(self) -> bool:
        """Some backward passes are cut in two."""
        return any(operation.kind == "W" for order in self.orders for operation in order)


def make_schedule(
    placement: ChunkPlacement, num_micro_batches: int, orders: Sequence[Sequence[Operation]]
) -> PipelineSchedule:
    """A schedule of lists."""
    return PipelineSchedule(placement, num_micro_batches, tuple(tuple(order) for order in orders))


Pass = tuple[bool, int, int]
"""A pass as others ask for it: whether it is a forward one, chunk and micro-batch. B and I are the same to them."""


def shown(wanted: Pass) -> str:
    """A pass as a file would name it."""
    is_forward, chunk, micro_batch = wanted
    return f"{chunk}F{micro_batch}" if is_forward else f"{chunk}B{micro_batch} or {chunk}I{micro_batch}"


def made_by(operation: Operation) -> Pass | None:
    """What other passes wait for of one; None of W, for which nobody waits."""
    return None if operation.kind == "W" else (operation.kind == "F", operation.chunk, operation.micro_batch)


def needs(operation: Operation, num_chunks: int) -> tuple[Pass, ...]:
    """What must be there before a pass."""
    return tuple(each for each in _inputs(operation, num_chunks - 1) if each is not None)


def _inputs(operation: Operation, last: int) -> tuple[Pass | None, Pass | None]:
    """What a pass needs of its own chunk, and of the chunk beside it: a forward one that of the chunk before it; a
    backward one its own forward pass, and the backward pass of the chunk behind; one for the weights the input's."""
    kind, chunk, micro_batch = operation
    if kind == "F":
        return None, ((True, chunk - 1, micro_batch) if chunk else None)
    if kind == "W":
        return (False, chunk, micro_batch), None
    return (True, chunk, micro_batch), ((False, chunk + 1, micro_batch) if chunk < last else None)


@dataclass(frozen=True)
class Wiring:
    """The passes of a schedule, in an order in which each finds what it waits for, as numbers: a step of hundreds of
    stages has hundreds of thousands. Places begin at `FIRST_PLACE`; those before it are of no pass."""

    rank: array[int]
    cost: array[int]
    """Kind and chunk, as `cost_index` numbers them."""
    before: array[int]
    """Place of the pass before it on its rank; `AT_ONCE` for the first."""
    sender: array[int]
    """Place of the pass whose result comes from another rank; `NEVER` for none. What its own rank has made is there
    since before; and as all passes of a chunk are on one rank (`check_orders`), no pass waits for two others."""


AT_ONCE, NEVER, FIRST_PLACE = 0, 1, 2


def cost_index(kind: Kind, chunk: int) -> int:
    """A number for each kind of pass of each chunk."""
    return len(KINDS) * chunk + KINDS.index(kind)


def _wire(schedule: PipelineSchedule) -> Wiring:
    orders, ranks, last = schedule.orders, schedule.placement.ranks, schedule.placement.num_chunks - 1
    wiring = Wiring(*(array("l") for _ in range(4)))
    finished: dict[Pass, int] = {}
    """Places."""
    waiting: dict[Pass, list[int]] = {}
    done, latest, able = [0] * len(orders), [AT_ONCE] * len(orders), list(range(len(orders)))
    place = FIRST_PLACE
    while able:
        rank = able.pop()
        for operation in orders[rank][done[rank] :]:
            own, other = _inputs(operation, last)
            if own is not None and own not in finished:
                waiting.setdefault(own, []).append(rank)
                break
            if other is not None and other not in finished:
                waiting.setdefault(other, []).append(rank)
                break
            wiring.rank.append(rank)
            wiring.cost.append(cost_index(operation.kind, operation.chunk))
            wiring.before.append(latest[rank])
            wiring.sender.append(NEVER if other is None or ranks[other[1]] == rank else finished[other])
            made = made_by(operation)
            if made is not None:
                finished[made] = place
                if made in waiting:
                    able += waiting.pop(made)
            latest[rank] = place
            place += 1
            done[rank] += 1
    if waiting:
        raise ScheduleError(_stuck(schedule, done, waiting))
    return wiring


def _stuck(schedule: PipelineSchedule, done: Sequence[int], waiting: dict[Pass, list[int]]) -> str:
    """Who waits for what."""
    sentences = [
        f"rank {rank} waits with {schedule.orders[rank][done[rank]]} for {shown(wanted)}"
        for wanted, ranks in waiting.items()
        for rank in ranks
    ]
    return "no rank can go on: " + "; ".join(sorted(sentences))


def goes_to(operation: Operation, ranks: Sequence[int]) -> int | None:
    """The rank that waits for what a pass has made, which may be the same one; None where nobody does.

    Args:
        ranks: by chunk, as `ChunkPlacement.ranks`.
    """
    if operation.kind == "W":
        return None
    chunk = operation.chunk + (1 if operation.kind == "F" else -1)
    return ranks[chunk] if 0 <= chunk < len(ranks) else None
