"""What layouts take at least, in seconds and in memory: by these a search puts them in order, and passes some over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from megalite.config.fill import fill
from megalite.config.plan import chunk_blocks, make_plan, place_chunks
from megalite.config.schema import Config
from megalite.config.stream import stream_tokens
from megalite.config.trained import trained_parts
from megalite.engine.footprint import footprint
from megalite.planner.block_memory import block_activations, is_compiled, recomputed
from megalite.planner.holdings import numbers_by_stage
from megalite.planner.layouts import Candidate
from megalite.planner.machines import Machine
from megalite.planner.practice import Practice
from megalite.planner.seconds import micro_batch_seconds

MicroBatches = dict[tuple[int | str, ...], tuple[float, float]]
"""Seconds of one through the whole model, and bytes that are kept of it, by what sets them apart: neither ranks nor the
size of a batch."""


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
        self._model = model = fill(base, vocab_size)
        self._are_alike = len(set(model.kinds())) == 1 and not model.num_predictions and not self._has_frozen
        """Whether blocks are, in their seconds and in what they keep."""
        self._splits: dict[tuple[int, str, int | None], tuple[int, ...]] = {}
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
        first = 0.0 if is_away else kept * (1.0 if layout.pp == 1 else SHARE_OF_FIRST * self._under_way(layout))
        return lasting / layout.pp + at_work + first

    def _under_way(self, layout: Candidate) -> float:
        """Micro-batches in a first stage's chunks, in their mean over as many as there are stages."""
        count = self._base.batch.global_batch_size // (layout.dp * layout.micro_batch_size)
        if layout.schedule != "interleaved" or layout.chunks is None or count < 2 * layout.pp:
            return 1.0
        return (layout.chunks + 1) / layout.chunks - 1 / (layout.chunks * layout.pp)

    def least_again(self, layout: Candidate, most: float) -> int | None:
        """Of each stage's blocks, at least how many have to be made again for a layout that makes nothing again to
        take so few bytes; None where it takes more even with as many as may be."""
        most_again = self.most_again(layout)
        if most_again < 1 or self.memory(replace(layout, blocks_again=most_again)) > most:
            return None
        nothing = self.memory(layout)
        if nothing <= most:
            return 1  # by this bound it fits
        of_one = nothing - self.memory(replace(layout, blocks_again=1))
        return min(most_again, ceil((nothing - most) / of_one))

    def most_again(self, layout: Candidate) -> int:
        """All blocks of a layout's fullest stage but one; where blocks predict further ahead, which are not among them,
        all."""
        return max(self._blocks_by_stage(layout)) - (0 if self._model.num_predictions else 1)

    def _blocks_by_stage(self, layout: Candidate) -> tuple[int, ...]:
        key = layout.pp, layout.schedule, layout.chunks
        if key not in self._splits:
            parallel, counts = layout.applied_to(self._base).parallel, [0] * layout.pp
            placement = place_chunks(parallel, None)
            chunks = chunk_blocks(parallel, self._model, self._base.batch.seq_len, placement)
            for rank, (first, stop) in zip(placement.ranks, chunks, strict=True):
                counts[rank] += stop - first
            self._splits[key] = tuple(counts)
        return self._splits[key]

    def is_repeated(self, layout: Candidate) -> bool:
        """Whether it is another one in other words: compiled blocks do under `none` what `selective` says."""
        if layout.recompute == "selective" and self._compiles is None:
            config, ranks = layout.applied_to(self._base), layout.dp * layout.cp * layout.tp * layout.pp
            self._compiles = is_compiled(config, make_plan(config, ranks, self._vocab_size))
        return layout.recompute == "selective" and bool(self._compiles)

    def _of_micro_batch(self, layout: Candidate) -> tuple[float, float]:
        """Seconds through the whole model, and bytes kept of it."""
        seconds, kept = self._of_uniform(layout, layout.recompute)
        if not layout.blocks_again:
            return seconds, kept
        seconds_of_all, kept_of_all = self._of_uniform(layout, "full")
        if not self._are_alike:  # the first may be the cheapest, and those that keep most
            return seconds, kept_of_all
        blocks = self._blocks_by_stage(layout)
        share = sum(min(layout.blocks_again, each) for each in blocks) / self._model.num_layers
        gone = min(1.0, layout.blocks_again / blocks[0] * _of_first_chunk(layout))
        return seconds + share * (seconds_of_all - seconds), kept - gone * (kept - kept_of_all)

    def _of_uniform(self, layout: Candidate, recompute: str) -> tuple[float, float]:
        """The same where all blocks make as much again."""
        shared = layout.tp, layout.cp, layout.ep, layout.divides_sequences
        key = (*shared, layout.micro_batch_size, recompute, layout.offloads)
        if key not in self._of_micro_batches:
            alone = replace(
                layout,
                pp=1,
                dp=layout.ep,
                schedule="1f1b",
                chunks=None,
                divides_weights=False,
                copies=1,
                recompute=recompute,
                blocks_again=0,
            )
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


def _of_first_chunk(layout: Candidate) -> float:
    """Of what the first stage keeps, its first chunk's blocks at most, over their share of its blocks: more of their
    micro-batches are under way. Interleaved, those are twice as many as there are stages, and all chunks' (chunks + 1)
    times as many; where one chunk goes there and the next one back they may be all."""
    if layout.chunks is None:
        return 1.0
    return 2 * layout.chunks / (layout.chunks + 1) if layout.schedule == "interleaved" else 2.0


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
