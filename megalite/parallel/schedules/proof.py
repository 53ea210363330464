"""That programs end, and do all of a step once: checked line by line, before any process starts.

    every pass is there once: F, and B or else I and W, of each chunk and micro-batch, on the rank that holds the chunk
    every pass finds its inputs made here, or received
    every message is sent once and received once, by those two
    no rank keeps more micro-batches for their backward passes than is said of the schedule
    with sends and receives that wait for each other, which is the worst that a network may do, all programs end

A network that buffers, as gloo's, hides a deadlock; NCCL may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from megalite.parallel.schedules.operations import (
    ChunkPlacement,
    Kind,
    Operation,
    Pass,
    PipelineSchedule,
    ScheduleError,
    made_by,
    needs,
    shown,
)
from megalite.parallel.schedules.programs import Instruction, Program


def check_orders(schedule: PipelineSchedule) -> None:
    """See that every pass is there once, where its chunk is.

    Raises:
        ScheduleError: naming the first that is not.
    """
    placement = schedule.placement
    if len(schedule.orders) != placement.num_ranks:
        raise ScheduleError(f"found orders of {len(schedule.orders)} ranks, expected {placement.num_ranks}")
    counts: Counter[Operation] = Counter()
    for rank, order in enumerate(schedule.orders):
        for operation in order:
            if not 0 <= operation.chunk < placement.num_chunks:
                raise ScheduleError(
                    f"rank {rank}: {operation} is of chunk {operation.chunk}; there are {placement.num_chunks}"
                )
            if not 0 <= operation.micro_batch < schedule.num_micro_batches:
                raise ScheduleError(
                    f"rank {rank}: {operation} is of micro-batch {operation.micro_batch}; a step has "
                    f"{schedule.num_micro_batches}"
                )
            holder = placement.ranks[operation.chunk]
            if holder != rank:
                raise ScheduleError(f"rank {rank}: does {operation}, but chunk {operation.chunk} is on rank {holder}")
            counts[operation] += 1
    for problem in _miscounted(counts, schedule):
        raise ScheduleError(problem)


def _miscounted(counts: Counter[Operation], schedule: PipelineSchedule) -> Iterator[str]:
    for operation, count in counts.items():
        if count > 1:
            yield f"rank {schedule.placement.ranks[operation.chunk]}: {operation} stands there {count} times"
    for chunk in range(schedule.placement.num_chunks):
        for micro_batch in range(schedule.num_micro_batches):
            kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
            forward, whole, inputs, weights = (counts[Operation(kind, chunk, micro_batch)] for kind in kinds)
            where = f"rank {schedule.placement.ranks[chunk]}: "
            if not forward:
                yield f"{where}{chunk}F{micro_batch} is missing"
            if not (whole or inputs or weights):
                yield f"{where}{chunk}B{micro_batch} is missing, or {chunk}I{micro_batch} and {chunk}W{micro_batch}"
            elif whole and (inputs or weights):
                other = "I" if inputs else "W"
                yield f"{where}both {chunk}B{micro_batch} and {chunk}{other}{micro_batch}: B is I and W in one"
            elif inputs != weights:
                yield f"{where}{chunk}{'W' if inputs else 'I'}{micro_batch} is missing: it belongs to the other half"


def check_kept(schedule: PipelineSchedule, most: Sequence[int]) -> None:
    """See that no rank keeps more for backward passes than it may.

    Args:
        most: micro-batches, times chunks, by rank.

    Raises:
        ScheduleError: naming the pass with which one does.
    """
    for rank, (order, limit) in enumerate(zip(schedule.orders, most, strict=True)):
        for operation, kept in zip(order, kept_after(order), strict=True):
            if kept > limit:
                raise ScheduleError(
                    f"rank {rank}: with {operation} it keeps {kept} micro-batches, expected {limit} at most"
                )


def kept_after(order: Iterable[Operation]) -> Iterator[int]:
    """How many micro-batches, times chunks, a rank keeps after each of its passes: until B, or W where it is split."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return accumulate(change[operation.kind] for operation in order)


def prove(programs: Sequence[Program], placement: ChunkPlacement) -> None:
    """See that programs end whatever the network does, and that every pass finds its inputs.

    Raises:
        ScheduleError: naming the pass or the two messages at fault.
    """
    for rank, program in enumerate(programs):
        _check_inputs(rank, program, placement)
    _check_messages(programs)
    _run_with_waiting_sends(programs)


def _check_inputs(rank: int, program: Program, placement: ChunkPlacement) -> None:
    there: set[Pass] = set()
    for instruction in program:
        operation, made = instruction.operation, made_by(instruction.operation)
        if instruction.what == "do":
            for need in needs(operation, placement.num_chunks):
                if need not in there:
                    raise ScheduleError(f"rank {rank}: {operation} comes before {shown(need)}, whose result it needs")
        elif instruction.what == "send" and made not in there:
            raise ScheduleError(f"rank {rank}: {instruction} comes before the pass itself")
        if instruction.what != "send" and made is not None:
            there.add(made)


def _check_messages(programs: Sequence[Program]) -> None:
    """Each is sent once and received once."""
    sent = Counter((rank, each.peer, each.operation) for rank, each in _lines(programs, "send"))
    received = Counter((each.peer, rank, each.operation) for rank, each in _lines(programs, "receive"))
    for (sender, receiver, operation), count in (sent | received).items():
        found = sent[sender, receiver, operation], received[sender, receiver, operation]
        if found != (1, 1):
            raise ScheduleError(
                f"the message of {operation} from rank {sender} to rank {receiver} is sent {found[0]} times and "
                f"received {found[1]} times, expected once each"
            )
        assert count == 1


def _lines(programs: Sequence[Program], what: str) -> Iterator[tuple[int, Instruction]]:
    return ((rank, each) for rank, program in enumerate(programs) for each in program if each.what == what)


def _run_with_waiting_sends(programs: Sequence[Program]) -> None:
    messages = [[each for each in program if each.what != "do"] for program in programs]
    places = [0] * len(programs)
    able = list(range(len(programs)))
    while able:
        rank = able.pop()
        while places[rank] < len(messages[rank]):
            mine = messages[rank][places[rank]]
            peer = mine.peer
            theirs = messages[peer][places[peer]] if places[peer] < len(messages[peer]) else None
            if theirs is None or theirs.peer != rank or theirs.operation != mine.operation or theirs.what == mine.what:
                break
            places[rank] += 1
            places[peer] += 1
            able.append(peer)
    stuck = [rank for rank in range(len(programs)) if places[rank] < len(messages[rank])]
    if stuck:
        waits = "; ".join(f"rank {rank} waits with: {messages[rank][places[rank]]}" for rank in stuck)
        raise ScheduleError(f"where a send waits for its receiver, no rank can go on: {waits}")
