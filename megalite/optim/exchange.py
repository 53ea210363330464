"""Whole matrices for a moment: the slices of a weight travel to one rank, which works on it, and come back.

Muon orthogonalises whole matrices, Adafactor needs sums over whole rows and columns, blocks of 8-bit moments must not
end where a shard ends. A rank has none of these whole: tp cuts matrices into rectangles, ZeRO cuts those into runs of
numbers. So each *unit*, a weight or some rows of it, has one owner among the ranks that share it:

    slices on all ranks  --all-to-all-->  a unit, whole, on its owner  --all-to-all-->  slices again

Every rank sends what it has and gets as much back, two times its share of the weights, which beside ZeRO's own
gathering of all weights is little; owners are chosen so that the work is even. What an owner keeps of a unit has
nothing to do with how the run is cut. Units go in rounds, and what a round needs is made for it and gone with it, so
that an update's memory is a round's, however large the model.

A weight that every tp rank holds whole (norms) is a unit for each of them, owned among those of the same tp rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.optim.at_work import ROUND_NUMBERS
from megalite.optim.slices import Slice
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import from_all


@dataclass(frozen=True)
class Unit:
    """Consecutive whole rows of a canonical weight."""

    weight: Weight
    replica: int
    """tp rank of the copy, for a weight that is not cut; else 0."""
    first_row: int
    num_rows: int
    owner: int = 0
    """Rank on the axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.weight.shape[1:])

    @property
    def rectangle(self) -> Rectangle:
        """Its place in the weight."""
        return Rectangle((self.first_row, *(0 for _ in self.weight.shape[1:])), self.shape)


@dataclass(frozen=True)
class _Piece:
    """Where numbers of a unit lie: in a slice of some rank, and in a part of the unit."""

    rank: int
    slice_index: int
    start: int
    """In the slice."""
    length: int
    part: Rectangle
    """A tensor-parallel rank's part of the unit, counted from the unit's first row."""
    offset: int
    """In the flattened part."""


@dataclass(frozen=True)
class _Held:
    """What one rank tells the others of one of its slices."""

    weight: Weight
    replica: int
    rectangle: Rectangle
    start: int
    stop: int


@dataclass(frozen=True)
class _Round:
    """Units that are whole at the same time, with their pieces in the order in which they travel."""

    units: list[tuple[Unit, list[_Piece]]]


class Exchange:
    """Brings units together and apart again. Building it is collective over the axis.

    Args:
        slices: this rank's.
        axis: the ranks that share the units: dp x tp under ZeRO, tp without.
        tp_rank: this rank's place in tensor parallelism.
        like: a tensor of the format and on the device of all that travels.
        rows_of_units: the runs of rows that a weight is cut into, for instance one of all rows.
        cost_of_unit: the work of one, to share it out evenly.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        axis: Axis,
        tp_rank: int,
        *,
        like: Tensor,
        rows_of_units: Callable[[Weight], list[tuple[int, int]]],
        cost_of_unit: Callable[[Unit], float],
    ):
        self.axis, self._like = axis, like.new_empty(0)
        held = [
            _Held(
                part.local.weight,
                tp_rank if part.local.weight.cut is None else 0,
                part.local.rectangle,
                part.start,
                part.stop,
            )
            for part in slices
        ]
        tables = from_all((tp_rank, held), axis)
        units = _assign(_units(tables, rows_of_units), [rank for rank, _ in tables], cost_of_unit)
        self.units = [unit for unit in units if unit.owner == axis.rank]
        """Those that this rank owns."""
        self._rounds = _rounds(units, tables, ROUND_NUMBERS if axis.size > 1 else 1)
        self._begin, self._end = _ends(self._rounds, axis.rank)
        """The slices of which each round has the first, and the last, numbers."""

    def map(
        self,
        make: Callable[[list[int]], list[Tensor]],
        function: Callable[[Unit, Tensor], Tensor],
        take: Callable[[dict[int, Tensor]], None],
    ) -> None:
        """Apply a function to whole units, round after round. Collective over the axis.

        Args:
            make: flat tensors of some slices, given their numbers, when a round needs the first of them; all of one
                type. What is nobody else's is gone when it has been sent.
            function: gets a unit that this rank owns and its tensor, not to be changed, and returns one of that shape.
            take: gets the results of slices, cut as those are, when they are complete.
        """
        waiting: dict[int, Tensor] = {}
        unfinished: dict[int, Tensor] = {}
        for each, begin, end in zip(self._rounds, self._begin, self._end, strict=True):
            waiting |= dict(zip(begin, make(begin) if begin else [], strict=True))
            self._run(each, waiting, unfinished, function, end)
            take({index: unfinished.pop(index) for index in end})

    def _run(
        self,
        each: _Round,
        waiting: dict[int, Tensor],
        results: dict[int, Tensor],
        function: Callable[[Unit, Tensor], Tensor],
        end: list[int],
    ) -> None:
        """One round: each thing is gone before the next one but one is there. A result is made of what `waiting` has,
        which is gone for the slices that end."""
        rank, ranks = self.axis.rank, range(self.axis.size)
        mine = [(unit.owner, piece) for unit, pieces in each.units for piece in pieces if piece.rank == rank]
        sent = [piece for to in ranks for owner, piece in mine if owner == to]
        owned = [(unit, pieces) for unit, pieces in each.units if unit.owner == rank]
        received = [piece for source in ranks for _, pieces in owned for piece in pieces if piece.rank == source]
        sizes_out = [sum(piece.length for owner, piece in mine if owner == to) for to in ranks]
        sizes_in = [sum(piece.length for piece in received if piece.rank == source) for source in ranks]

        sizes = {piece.slice_index: waiting[piece.slice_index].numel() for piece in sent}
        outgoing = self._joined(waiting[p.slice_index].narrow(0, p.start, p.length) for p in sent)
        for index in end:
            del waiting[index]
        incoming = self._send(outgoing, sizes_out, sizes_in)
        del outgoing
        places, answers = _places(received), dict[_Piece, Tensor]()
        for unit, pieces in owned:
            answers |= _take_apart(function(unit, _assemble(unit, pieces, incoming, places)), pieces)
        del incoming
        outgoing = self._joined(answers[p] for p in received)
        answers.clear()
        back = self._send(outgoing, sizes_in, sizes_out)
        del outgoing
        for piece, place in _places(sent).items():
            _put(results, piece, back.narrow(0, place, piece.length), sizes[piece.slice_index])

    def _joined(self, tensors: Iterable[Tensor]) -> Tensor:
        """Flat tensors in a row; a single one as it is."""
        found = list(tensors)
        return found[0] if len(found) == 1 else torch.cat(found) if found else self._like

    def _send(self, joined: Tensor, sizes_out: list[int], sizes_in: list[int]) -> Tensor:
        """All-to-all of what is in order of the ranks it goes to."""
        if self.axis.size == 1:
            return joined
        result = self._like.new_empty(sum(sizes_in))
        dist.all_to_all_single(result, joined, sizes_in, sizes_out, group=self.axis.group)
        return result


def _put(results: dict[int, Tensor], piece: _Piece, numbers: Tensor, size: int) -> None:
    """A piece of a slice's result, which has so many numbers: where it is all of it, as it came."""
    if piece.length == size:
        results[piece.slice_index] = numbers
        return
    whole = results.setdefault(piece.slice_index, numbers.new_empty(size))
    whole.narrow(0, piece.start, piece.length).copy_(numbers)


def _units(
    tables: list[tuple[int, list[_Held]]], rows_of_units: Callable[[Weight], list[tuple[int, int]]]
) -> list[Unit]:
    """The units of every weight that somebody holds, in an order that all ranks agree on."""
    weights = {(held.weight.name, held.replica): held.weight for _, table in tables for held in table}
    return [
        Unit(weight, replica, first, stop - first)
        for (_, replica), weight in sorted(weights.items(), key=lambda item: item[0])
        for first, stop in rows_of_units(weight)
    ]


def _assign(units: list[Unit], tp_ranks: list[int], cost_of_unit: Callable[[Unit], float]) -> list[Unit]:
    """Give each unit, the costliest first, to the rank with the least work among those that may own it."""
    loads = [0.0] * len(tp_ranks)
    assigned = []
    for unit in sorted(units, key=cost_of_unit, reverse=True):
        is_cut = unit.weight.cut is not None
        owner = min(
            (rank for rank, tp_rank in enumerate(tp_ranks) if is_cut or tp_rank == unit.replica),
            key=lambda rank: (loads[rank], rank),
        )
        loads[owner] += cost_of_unit(unit)
        assigned.append(replace(unit, owner=owner))
    return assigned


def _rounds(units: list[Unit], tables: list[tuple[int, list[_Held]]], most: int) -> list[_Round]:
    """Fill rounds with the units of each owner, in order: so many numbers an owner at most, or one unit."""
    by_weight: dict[tuple[str, int], list[tuple[int, int, _Held]]] = {}
    for rank, (_, table) in enumerate(tables):
        for index, held in enumerate(table):
            by_weight.setdefault((held.weight.name, held.replica), []).append((rank, index, held))
    rounds: list[_Round] = []
    place, filled = [0] * len(tables), [0] * len(tables)
    for unit in units:
        size, owner = math.prod(unit.shape), unit.owner
        if filled[owner] and filled[owner] + size > most:
            place[owner], filled[owner] = place[owner] + 1, 0
        filled[owner] += size
        while len(rounds) <= place[owner]:
            rounds.append(_Round([]))
        holders = by_weight[unit.weight.name, unit.replica]
        pieces = [piece for holder in holders if (piece := _piece(unit, *holder)) is not None]
        assert sum(piece.length for piece in pieces) == size, f"{unit}: the slices do not cover it"
        rounds[place[owner]].units.append((unit, pieces))
    return rounds


def _piece(unit: Unit, rank: int, index: int, held: _Held) -> _Piece | None:
    """What a slice has of a unit."""
    start, shape = held.rectangle.start, held.rectangle.shape
    first = max(unit.first_row, start[0])
    last = min(unit.first_row + unit.num_rows, start[0] + shape[0])
    row_size = math.prod(shape[1:])
    begin, end = (first - start[0]) * row_size, (last - start[0]) * row_size
    here, stop = max(begin, held.start), min(end, held.stop)
    if here >= stop:
        return None
    part = Rectangle((first - unit.first_row, *start[1:]), (last - first, *shape[1:]))
    return _Piece(rank, index, here - held.start, stop - here, part, here - begin)


def _ends(rounds: list[_Round], rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """The slices of a rank that begin in each round, and those that end there."""
    begin, end = ([list[int]() for _ in rounds] for _ in range(2))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, each in enumerate(rounds):
        for piece in (piece for _, pieces in each.units for piece in pieces if piece.rank == rank):
            first.setdefault(piece.slice_index, number)
            last[piece.slice_index] = number
    for places, found in ((begin, first), (end, last)):
        for index, number in found.items():
            places[number].append(index)
    return begin, end


def _places(pieces: list[_Piece]) -> dict[_Piece, int]:
    """Where each piece begins in all their numbers in a row."""
    places, position = {}, 0
    for piece in pieces:
        places[piece] = position
        position += piece.length
    return places


def _assemble(unit: Unit, pieces: list[_Piece], incoming: Tensor, places: dict[_Piece, int]) -> Tensor:
    """A whole unit from its pieces."""
    if len(pieces) == 1:
        return incoming.narrow(0, places[pieces[0]], pieces[0].length).view(unit.shape)
    whole, parts = incoming.new_empty(unit.shape), dict[Rectangle, Tensor]()
    for piece in pieces:
        target = whole[piece.part.slices]
        if not target.is_contiguous():
            if piece.part not in parts:
                parts[piece.part] = incoming.new_empty(math.prod(piece.part.shape))
            target = parts[piece.part]
        source = incoming.narrow(0, places[piece], piece.length)
        target.view(-1).narrow(0, piece.offset, piece.length).copy_(source)
    for part, numbers in parts.items():
        whole[part.slices] = numbers.view(part.shape)
    return whole


def _take_apart(whole: Tensor, pieces: list[_Piece]) -> dict[_Piece, Tensor]:
    """The numbers of each piece, out of a whole unit."""
    parts = {piece.part: whole[piece.part.slices].reshape(-1) for piece in pieces}
    return {piece: parts[piece.part].narrow(0, piece.offset, piece.length) for piece in pieces}
