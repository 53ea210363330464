"""Memory of a rank at the peak of a step, stage by stage, before anything runs.

    model state   weights | gradients | master weights and moments      lives through the run     (ZeRO, section 3)
    activations   what the blocks keep for the backward pass            for all micro-batches in flight
    host          what of both waits, or lives, in the host's memory
    head          final norm, loss in chunks, gradient of the matrix    the last chunk's stage only
    buffers       gradient buckets, gathered weights, pipeline traffic

The formulas count the tensors that this code and DeepSpeed 0.19 allocate; tests hold them against a real block and
against the loss's own constants. Left out: the CUDA context and NCCL (1-2 GB together), on a CPU the process itself
(0.4 to 0.6 GB, docs/config.md), and the allocator's fragmentation (leave a tenth).
Sources: ZeRO (Rajbhandari et al. 2020), activations and their recomputation (Korthikanti et al. 2022, section 4). How
many micro-batches are in flight is counted in the schedule itself.

Legend: a bytes of an element, t tokens of a micro-batch, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import add
from typing import NamedTuple

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.architecture.norms import NORMS
from megalite.architecture.weights import vocab_rows_per_rank
from megalite.config.engine import choose_engine
from megalite.config.pipeline import few_rounds, micro_batch_counts, pipeline_schedule
from megalite.config.plan import CACHED_LOGITS, LOSS_CHUNK_TOKENS, PRODUCT_PIECE, RunPlan
from megalite.config.schema import Config
from megalite.engine.footprint import footprint
from megalite.engine.kept import EngineNumbers, InBlocks, has_gradient, head_numbers
from megalite.parallel.schedules.operations import KINDS, Codes
from megalite.parallel.schedules.programs import SENDS_UNDER_WAY
from megalite.parallel.schedules.simulation import ByPass, ChunkCosts, memory_changes, peak_at_work, peak_kept
from megalite.planner.block_memory import (
    KeptByBlocks,
    in_attention,
    in_mlp,
    kept_by_blocks,
    micro_batch_tokens,
    norm_gradients,
    stream_bytes,
    stream_width,
)
from megalite.planner.holdings import numbers_by_stage, rounded_bytes_by_stage
from megalite.planner.practice import OURS, Practice
from megalite.planner.update_memory import update_bytes_by_stage


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one pipeline stage, at the peak of a step."""

    stage: int
    num_parameters: int
    """Parameters that a rank holds before ZeRO cuts them: its share over tp, vocabulary padding included."""
    weights: int
    gradients: int
    optimizer: int
    """Master weights and the optimizer's state."""
    activations: int
    host: int
    """Activations that wait in the host's memory, masters and state that live there; the total leaves them out."""
    head: int
    buffers: int
    apart: int
    """Of all this, what is there at other moments than the rest, which the total leaves out: what the head has of a
    micro-batch, of which a block at its backward pass finds the stream's gradient alone, or such a block; and what only
    the end of the backward pass needs."""

    @property
    def total(self) -> int:
        parts = self.weights + self.gradients + self.optimizer + self.activations + self.head + self.buffers
        return parts - self.apart

    def to_dict(self) -> dict[str, int]:
        """A JSON-ready form, total included."""
        return {**asdict(self), "total": self.total}


def memory_by_stage(config: Config, plan: RunPlan, practice: Practice = OURS) -> tuple[StageMemory, ...]:
    """Peak memory of the ranks of every pipeline stage, first to last, in the largest step that the run may have.

    Args:
        practice: of the software: whether attention writes its scores, and makes them again. All else is megalite's.
    """
    return tuple(each_stage(config, plan, practice))


def each_stage(config: Config, plan: RunPlan, practice: Practice = OURS) -> Iterator[StageMemory]:
    """The same, one after the other: who looks for a stage that does not fit need not wait for the others."""
    most = max(micro_batch_counts(config, plan))
    schedule = pipeline_schedule(config, plan, most if plan.own_schedule is not None else few_rounds(most, plan.pp))
    numbers = numbers_by_stage(config, plan)
    blocks = kept_by_blocks(config, plan, practice)
    tokens = micro_batch_tokens(config)
    changes = [tokens * each for each in memory_changes(blocks.by_chunk)]
    at_work = [tokens * each.get(kind, 0) for each in blocks.at_work for kind in KINDS]
    for stage, (each, codes) in enumerate(zip(numbers, schedule.codes, strict=True)):
        yield _stage_memory(config, plan, stage, each, _Passes(codes, changes, at_work, practice), blocks)


def on_device(config: Config, device_type: str) -> Config:
    """The config of a run whose device is known."""
    return config.model_copy(update={"train": config.train.model_copy(update={"device": device_type})})


class _Passes(NamedTuple):
    """Of a stage, in order, and bytes of a micro-batch in each kind of pass through each chunk."""

    codes: Codes
    changes: ByPass
    """That it adds to what is kept."""
    at_work: ByPass
    """That it has for a moment."""
    practice: Practice


def _stage_memory(
    config: Config,
    plan: RunPlan,
    stage: int,
    numbers: EngineNumbers,
    passes: _Passes,
    blocks: KeptByBlocks,
) -> StageMemory:
    kept = footprint(config, plan, numbers)
    of_each, logits = _head(config, plan) if stage == plan.chunk_ranks[-1] else (0, 0)
    in_blocks, for_a_moment, lasting = _activations(config, plan, stage, passes, of_each)
    is_away = config.train.offload_activations and config.train.device != "cpu"
    two_inputs = 2 * stream_bytes(config, plan)
    activations = two_inputs if is_away else in_blocks
    passing = kept.in_blocks
    at_the_head = lasting + max(logits, passing.coming) + passing.at_head if of_each else lasting + logits
    beside_blocks = lasting - min(lasting, of_each) + (two_inputs // 2 + passing.head_gradient if of_each else 0)
    of_blocks = _of_blocks(passing, plan.blocks_of(stage), blocks, micro_batch_tokens(config), for_a_moment)
    at_the_norm = lasting - min(lasting, of_each) + _at_final_norm(config, plan) + passing.at_head if of_each else 0
    below = micro_batch_tokens(config) * blocks.below if stage == plan.chunk_ranks[0] else 0
    at_once = max(at_the_head, at_the_norm, beside_blocks + of_blocks, below - activations)
    during = activations + at_once
    update = update_bytes_by_stage(config, plan)[stage]
    is_on_host = config.optimizer.offload and config.train.device != "cpu"
    at_the_end = max(kept.after_backward, 0 if is_on_host else update)
    recorded = during if config.train.cuda_graphs else 0  # by a graph, beside what passes that are computed take
    return StageMemory(
        stage=stage,
        num_parameters=numbers.parameters,
        weights=kept.weights,
        gradients=kept.gradients,
        optimizer=kept.optimizer,
        activations=activations + for_a_moment,
        host=kept.host + (in_blocks if is_away else 0) + (update if is_on_host else 0),
        head=lasting + logits,
        buffers=kept.buffers
        + passing.most
        + at_the_end
        + _traffic(config, plan, stage)
        + rounded_bytes_by_stage(config, plan)[stage]
        + recorded
        + _reference(config, plan, numbers),
        apart=for_a_moment + passing.most + lasting + logits - at_once + min(during, at_the_end + kept.late_gradients),
    )


def _of_blocks(passing: InBlocks, mine: Sequence[int], blocks: KeptByBlocks, tokens: int, for_a_moment: int) -> int:
    """The most that blocks have in the backward pass, of the engine's and for a moment, beside what is kept before it:
    of the last two that is gone when they are done."""
    of_last, of_both = (tokens * sum(blocks.of_each[index] for index in mine[-count:]) for count in (1, 2))
    at_work = max(for_a_moment, passing.coming, passing.product)
    return max(
        passing.first + at_work,
        passing.behind_first - of_last,
        passing.second + at_work - of_last,
        passing.behind_second - of_both,
    )


def _reference(config: Config, plan: RunPlan, numbers: EngineNumbers) -> int:
    """The frozen model beside one that learns from pairs of answers: weights alone, or what FSDP2 keeps of them."""
    if config.train.preference is None or config.model.lora is not None:
        return 0
    if plan.sharding.weights:
        return numbers.updated * FP32_BYTES // (plan.num_replicas // config.parallel.dp_replicate)
    return numbers.parameters * ELEMENT_BYTES[config.precision.dtype]


def _activations(config: Config, plan: RunPlan, stage: int, passes: _Passes, at_the_head: int) -> tuple[int, int, int]:
    """What the chunks keep at most for the micro-batches in flight; what is there for a block at a time, because
    recomputation brings it back, or inside an MLP; and what the head's part of each micro-batch adds to the former."""
    mine = plan.blocks_of(stage)
    in_blocks = int(peak_kept(passes.codes, passes.changes))
    again = max(0, int(peak_at_work(passes.codes, passes.changes, passes.at_work)) - in_blocks)
    of_attention = in_attention(config, plan, mine, passes.practice)
    inside = max(in_mlp(config, plan, mine), micro_batch_tokens(config) * of_attention)
    if not at_the_head:
        return in_blocks, again + inside, 0
    of_head = memory_changes([ChunkCosts(kept=at_the_head, held=at_the_head)])
    with_head = [*passes.changes[: -len(KINDS)], *map(add, passes.changes[-len(KINDS) :], of_head)]
    return in_blocks, again + inside, int(peak_kept(passes.codes, with_head)) - in_blocks


def _head(config: Config, plan: RunPlan) -> tuple[int, int]:
    """The final norm and the gradients that the loss makes in a micro-batch's forward pass; and the larger of its
    transients.

    Those are a chunk of logits with as many in fp32 as are measured at once, or with the piece of a product that is
    added to the gradient, and in the backward pass of other engines than ours the scaled fp32 gradient.
    """
    a = ELEMENT_BYTES[config.precision.dtype]
    half = a != FP32_BYTES
    tokens = micro_batch_tokens(config)
    rows = min(vocab_rows_per_rank(plan.model.vocab_size, plan.tp), plan.model.vocab_size)
    matrix = head_numbers(config, plan)
    device = "cpu" if config.train.device == "cpu" else "cuda"
    chunk = min(LOSS_CHUNK_TOKENS[device], tokens)
    at_once = max(1, CACHED_LOGITS // rows) if device == "cpu" and plan.tp == 1 else chunk
    logits, at_once = chunk * rows * a, min(chunk, at_once)
    wide = at_once * rows * FP32_BYTES if half else 0
    product = 0  # a GPU's adds itself to the sum
    if half and device == "cpu":  # rounded, and from the second chunk on widened to be added
        piece = min(matrix, max(PRODUCT_PIECE, plan.model.hidden_size))
        product = (a + (FP32_BYTES if tokens > chunk else 0)) * piece
    gradients = tokens * 2 * a * plan.model.hidden_size + FP32_BYTES * matrix
    lasting = (1 + plan.model.num_predictions) * (_kept_by_final_norm(config, plan) + gradients)
    scaled = 0 if choose_engine(config) == "native" else FP32_BYTES * matrix  # ours scales it while it adds it
    return lasting, max(logits + max(wide, product), scaled)


def _kept_by_final_norm(config: Config, plan: RunPlan) -> int:
    """Of a micro-batch: its input in fp32, and what it multiplies with its weights."""
    a = ELEMENT_BYTES[config.precision.dtype]
    normalised = a if has_gradient("final_norm.weight", config) or not NORMS[plan.model.norm].keeps_wide else 0
    return micro_batch_tokens(config) * (FP32_BYTES + normalised) * stream_width(config, plan)


def _at_final_norm(config: Config, plan: RunPlan) -> int:
    """What a backward pass has when it is through the head and in the final norm, which is never compiled."""
    if not NORMS[plan.model.norm].keeps_wide:
        return 0
    at_work = norm_gradients(config) * FP32_BYTES * micro_batch_tokens(config) * stream_width(config, plan)
    return (1 + plan.model.num_predictions) * _kept_by_final_norm(config, plan) + at_work


def _traffic(config: Config, plan: RunPlan, stage: int) -> int:
    """Buffers of tensor-parallel collectives, of what pipeline stages hand on, and of what goes to experts."""
    a, tokens = ELEMENT_BYTES[config.precision.dtype], micro_batch_tokens(config)
    collective = a * tokens * plan.model.hidden_size if plan.tp > 1 else 0
    edge = stream_bytes(config, plan)
    cuts = plan.cuts_of(stage)
    leaving = cuts
    if config.train.device == "cpu":  # gloo's are kept until others follow
        leaving = min(SENDS_UNDER_WAY, cuts * plan.grad_accum_steps)
    both_ways = edge * (cuts + leaving)  # over each cut, what comes and what goes
    if config.parallel.async_tp:  # what torch's ops copy through: two pieces of a rank's rows
        collective += 2 * edge
    return collective + tokens * _sent_to_experts(config, plan, stage) + both_ways


def _sent_to_experts(config: Config, plan: RunPlan, stage: int) -> int:
    """Bytes of a token's copies at the ranks of their experts, in order of arrival and sorted, a block at a time."""
    sparse = plan.model.sparse_blocks
    if plan.ep == 1 or not any(sparse[index] for index in plan.blocks_of(stage)):
        return 0
    assert plan.model.moe is not None
    return 2 * ELEMENT_BYTES[config.precision.dtype] * plan.model.moe.top_k * plan.model.hidden_size
