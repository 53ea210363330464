"""What the blocks of a stage keep for their backward pass, and what one at work has beside that, in bytes of a token.

Legend: a bytes of an element, t tokens of a micro-batch, h hidden size, q and kv widths of all query and of all key
heads, f MLP width; q, kv and f divided by tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megalite.architecture.architecture import BlockKind, BlockSpec, ExpertsSpec, FeedForwardSpec
from megalite.architecture.attention_costs import gathered_bytes
from megalite.architecture.costs import (
    ELEMENT_BYTES,
    FP32_BYTES,
    BlockCut,
    block_activation_bytes,
    block_held_bytes,
    mlp_bytes,
    mlp_gradient_bytes,
)
from megalite.architecture.norms import NORMS
from megalite.architecture.trained import ALL_GRADIENTS, BlockGradients
from megalite.architecture.weights import LORA_B, weight_table
from megalite.config.engine import choose_engine
from megalite.config.plan import RunPlan, compile_pays
from megalite.config.recompute import recompute_by_block
from megalite.config.schema import Config
from megalite.config.stream import own_tokens, stream_tokens
from megalite.config.trained import block_gradients
from megalite.parallel.schedules.operations import Kind
from megalite.parallel.schedules.simulation import ChunkCosts
from megalite.planner.holdings import num_still_below
from megalite.planner.practice import OURS, Practice

COPIES_OF_OTHERS = 3
"""Of what a rank gets for its attention, at most at once: itself, the gradients, and these in the order in which they
are sent back."""


@dataclass(frozen=True)
class KeptByBlocks:
    """Bytes of one token."""

    of_each: list[int]
    """That a block keeps."""
    by_chunk: list[ChunkCosts]
    """That a chunk keeps, and of those what it holds from I until W."""
    again: list[int]
    """That recomputation brings back of each block."""
    at_work: list[dict[Kind, int]]
    """That a backward pass of a chunk has at most beside what is kept before it, of what it brings back; a pass that is
    split has what it holds of the blocks that it is through with."""
    below: int
    """That a block has at work in the forward pass, of those that keep nothing since no gradient goes down to them."""


def kept_by_blocks(config: Config, plan: RunPlan, practice: Practice = OURS) -> KeptByBlocks:
    """Of all blocks of the model, those that predict further behind the others."""
    model, element_bytes = plan.model, ELEMENT_BYTES[config.precision.dtype]
    everything = range(model.num_layers + model.num_predictions)
    kept, whole = (_kept_of_each(config, plan, kind, practice) for kind in (recomputed(config, plan), None))
    again = [all_of_it - some for all_of_it, some in zip(whole, kept, strict=True)]
    kinds = kinds_of(plan, everything)
    made = {kind: model.block_of(kind) for kind in set(kinds)}
    products = list(zip(kinds, _gradients(config, plan), strict=True))
    held_by = {
        each: block_held_bytes(
            made[each[0]], model.hidden_size, element_bytes=element_bytes, tp=plan.tp, gradients=each[1]
        )
        for each in set(products)
    }
    held = [held_by[each] for each in products]
    modes = list(zip(kinds, recomputed(config, plan), strict=True))
    beside = {(kind, mode): _input_beside(config, plan, mode, made[kind]) for kind, mode in set(modes)}
    again = [some + beside[each] for some, each in zip(again, modes, strict=True)]
    for index in _predicting(plan):
        kept[index] += _around_prediction(config, plan)
    still = range(num_still_below(config, plan))
    for index in still:
        kept[index] = again[index] = held[index] = 0
    bounds = [*plan.chunk_blocks[:-1], (plan.chunk_blocks[-1][0], len(everything))]  # what predicts further is behind
    is_away = config.train.offload_activations and config.train.device != "cpu"  # what blocks are given, nothing else
    tables = 0 if is_away else rotation_bytes(plan)
    by_chunk = [
        ChunkCosts(kept=sum(kept[slice(*each)]) + (tables if each[0] < each[1] else 0), held=sum(held[slice(*each)]))
        for each in bounds
    ]
    mlps = (
        mlp_bytes(block.feed_forward, element_bytes=element_bytes, tp=plan.tp) for block in blocks_among(plan, still)
    )
    streams = 2 * element_bytes * stream_width(config, plan)
    at_work: list[dict[Kind, int]] = [
        {"B": max(again[slice(*each)], default=0), "I": _at_work_of_half(again, kept, held, range(*each))}
        for each in bounds
    ]
    return KeptByBlocks(kept, by_chunk, again, at_work, below=max((streams + mlp for mlp in mlps), default=0))


def _kept_of_each(config: Config, plan: RunPlan, modes: Sequence[str] | None, practice: Practice) -> list[int]:
    """Of all blocks, those that predict further behind the others, with scores where attention writes them.

    Args:
        modes: what each makes again; None for nothing.
    """
    blocks = range(plan.model.num_layers + plan.model.num_predictions)
    kept = block_activations(config, plan, blocks, "none" if modes is None else modes)
    if practice.fused_attention:
        return kept
    redone = ("full", "selective", "compiled") if practice.redoes_attention else ("full",)
    return [
        each + (0 if modes is not None and modes[index] in redone else score_bytes(config, plan, block))
        for index, (each, block) in enumerate(zip(kept, map(plan.model.block_of, kinds_of(plan, blocks)), strict=True))
    ]


def score_bytes(config: Config, plan: RunPlan, block: BlockSpec) -> int:
    """Of a token, what attention that writes its scores keeps of them: the softmax's result, and with dropout its mask,
    a byte each, and what it leaves (Korthikanti et al. 2022, section 4.1)."""
    a = ELEMENT_BYTES[config.precision.dtype]
    each = 2 * a + 1 if plan.model.dropout > 0.0 else a
    return each * config.batch.seq_len * block.attention.num_heads // plan.tp


def _at_work_of_half(again: Sequence[int], kept: Sequence[int], held: Sequence[int], blocks: range) -> int:
    """The most in the half of a backward pass that goes from block to block, the last one first."""
    most = through = 0
    for index in reversed(blocks):
        most = max(most, through + again[index])
        through += held[index] - kept[index]
    return most


def rotation_bytes(plan: RunPlan) -> int:
    """Of one token: cosines and sines, made once for all blocks of a chunk."""
    model = plan.model
    ropes = [model.rope, model.sliding_rope] if model.positions == "rope" else []
    return FP32_BYTES * sum(int(model.turned_dim * rope.fraction) for rope in ropes if rope is not None)


def _input_beside(config: Config, plan: RunPlan, mode: str, block: BlockSpec) -> int:
    """What a block that is computed again was given, where its norm keeps a copy in fp32."""
    is_again = mode in ("selective", "full") and not is_compiled(config, plan)
    a = ELEMENT_BYTES[config.precision.dtype]
    is_copied = a != FP32_BYTES and block.norm_before and NORMS[block.norm].keeps_wide
    return a * stream_width(config, plan) if is_again and is_copied else 0


def is_compiled(config: Config, plan: RunPlan) -> bool:
    """Whether blocks are, on a GPU where the config does not name the CPU."""
    return compile_pays(config, plan, "cpu" if config.train.device == "cpu" else "cuda")


def recomputed(config: Config, plan: RunPlan) -> tuple[str, ...]:
    """What each block makes again in the backward pass, those that predict further behind the model's, as
    `block_activation_bytes` has it: compiled ones, whatever is no product, since it costs them nothing
    (`model.recompute`)."""
    modes = recompute_by_block(config, plan)
    if not is_compiled(config, plan):
        return modes
    is_in_graphs = config.train.device != "cpu" and config.precision.fp8 is None
    return tuple(mode if mode == "full" else "compiled" if is_in_graphs else "selective" for mode in modes)


def block_activations(config: Config, plan: RunPlan, blocks: Sequence[int], modes: str | Sequence[str]) -> list[int]:
    """Bytes of one token that each of some blocks keeps for its backward pass, on one rank.

    Args:
        modes: what all of them make again, or what each block of the model does.
    """
    fp8, a = config.precision.fp8, ELEMENT_BYTES[config.precision.dtype]
    is_in_chunks = config.train.mlp_chunk_tokens is not None
    of_each = [modes if isinstance(modes, str) else modes[index] for index in blocks]
    gradients = _gradients(config, plan)
    chosen = list(zip(kinds_of(plan, blocks), of_each, (gradients[index] for index in blocks), strict=True))
    seen = plan.cp if config.parallel.cp_kind == "allgather" else 1
    beside = _of_adapters(plan)
    cut = BlockCut(plan.tp, config.parallel.sequence_parallel, seen)

    def kept_by(block: BlockSpec, recompute: str, gradients: BlockGradients) -> int:
        kept = block_activation_bytes(
            block,
            plan.model.hidden_size,
            element_bytes=a,
            cut=cut,
            recompute=recompute,
            keeps_fp8_inputs=fp8 is not None and fp8.backend == "te",
            has_dropout=plan.model.dropout > 0.0,
            gradients=gradients,
        )
        if recompute != "full":
            kept += a * beside
        is_without_mlp = is_in_chunks and recompute == "none"
        return kept - (mlp_bytes(block.feed_forward, element_bytes=a, tp=plan.tp) if is_without_mlp else 0)

    found = {each: kept_by(plan.model.block_of(each[0]), *each[1:]) for each in set(chosen)}
    return [found[each] for each in chosen]


def _gradients(config: Config, plan: RunPlan) -> tuple[BlockGradients, ...]:
    """Of every block of the model, what its engine makes of them; or keeps the inputs for, though it does not."""
    engine, precision = choose_engine(config), config.precision
    if engine == "deepspeed":  # which makes gradients of frozen weights, too
        return (ALL_GRADIENTS,) * (plan.model.num_layers + plan.model.num_predictions)
    found = block_gradients(plan.model, config.optimizer)
    is_transformer_engine = precision.fp8 is not None and precision.fp8.backend == "te"
    if is_transformer_engine or precision.fp4 or precision.qat:
        return tuple(BlockGradients(norms=each.norms) for each in found)
    if engine == "native" and config.parallel.sequence_parallel and plan.tp > 1:  # what was gathered is kept
        return tuple(each._replace(entering=True, expanding=True) for each in found)
    return found


def _of_adapters(plan: RunPlan) -> int:
    """Numbers of a token that a block's adapters lead down to."""
    lora = plan.model.lora
    return 0 if lora is None else lora.rank * sum(name.endswith(LORA_B) for name in weight_table(plan.model, {0}))


def kinds_of(plan: RunPlan, blocks: Iterable[int]) -> list[BlockKind]:
    """Kinds of blocks by their numbers, those that predict further behind the model's, like its last."""
    kinds = plan.block_kinds
    return [kinds[min(index, len(kinds) - 1)] for index in blocks]


def blocks_among(plan: RunPlan, blocks: Sequence[int]) -> list[BlockSpec]:
    """One of each kind among blocks."""
    if len(plan.block_specs) == 1:
        return list(plan.block_specs.values()) if blocks else []
    return [plan.block_specs[kind] for kind in set(kinds_of(plan, blocks))]


def _predicting(plan: RunPlan) -> range:
    """Numbers of the blocks that predict further ahead."""
    return range(plan.model.num_layers, plan.model.num_layers + plan.model.num_predictions)


def _around_prediction(config: Config, plan: RunPlan) -> int:
    """Bytes of one token that a layer which predicts further keeps beside its block: what its two norms and the one
    behind it are given and put out, and both of them joined."""
    a, stream, norm = ELEMENT_BYTES[config.precision.dtype], stream_width(config, plan), NORMS[plan.model.norm]
    wide = FP32_BYTES * stream if norm.keeps_wide else 0
    normalised = (FP32_BYTES if norm.multiplies_wide else a) * stream
    return 3 * (wide + normalised) + 2 * a * stream


def in_mlp(config: Config, plan: RunPlan, blocks: Sequence[int]) -> int:
    """Inside the widest of some MLPs: gradients, which compiled blocks have in place of what is brought back, of
    experts those of what they put out, before and after it is weighed; and what it keeps, where it takes a chunk of
    tokens at a time."""
    a, tokens, chunk = ELEMENT_BYTES[config.precision.dtype], micro_batch_tokens(config), config.train.mlp_chunk_tokens
    are_compiled = is_compiled(config, plan)
    is_adapted = plan.model.lora is not None and "down" in plan.model.lora.found_targets

    def inside(mlp: FeedForwardSpec | ExpertsSpec) -> int:
        kept = 0 if chunk is None else mlp_bytes(mlp, element_bytes=a, tp=plan.tp)
        weighed = 2 * a * mlp.settings.top_k * plan.model.hidden_size if isinstance(mlp, ExpertsSpec) else 0
        gradients = mlp_gradient_bytes(mlp, element_bytes=a, tp=plan.tp, of_result=2 if is_adapted else 1)
        return kept + (0 if are_compiled else max(gradients, weighed))

    widest = max((inside(block.feed_forward) for block in blocks_among(plan, blocks)), default=0)
    pieces = plan.tp if config.parallel.sequence_parallel else 1  # gathered inside, so that a chunk there is tp of them
    return min((chunk or tokens) * pieces, tokens) * widest


def in_attention(config: Config, plan: RunPlan, blocks: Sequence[int], practice: Practice = OURS) -> int:
    """Of a token, what a block has when what its MLP kept is gone: its gradients in the norm before it, of
    context-parallel ranks, of scores where these are written, or halves of queries and keys while they are rotated,
    where the norm's is gone too."""
    a, stream = ELEMENT_BYTES[config.precision.dtype], stream_width(config, plan)
    are_compiled, norm = is_compiled(config, plan), NORMS[plan.model.norm]
    of_norm = (norm_gradients(config) if norm.keeps_wide and not are_compiled else 0) * FP32_BYTES * stream
    kept_by_norm = (FP32_BYTES if norm.multiplies_wide else a) * stream + a * plan.model.hidden_size
    kept_by_norm += FP32_BYTES * stream if norm.keeps_wide else 0

    def inside(block: BlockSpec) -> int:
        attention, rotated = block.attention, 0
        if attention.rope is not None and attention.latent is None and not are_compiled:
            halves = 4 if a == FP32_BYTES else 6  # what is in fp32 need not be made so
            rotated = halves * FP32_BYTES * (attention.q_width + attention.kv_width) // 2 // plan.tp
            rotated -= kept_by_norm if block.norm_before else 0
        of_scores = 0 if practice.fused_attention else a * config.batch.seq_len * attention.num_heads // plan.tp
        beside = max(_of_others(config, plan, block), rotated, of_norm if block.norm_before else 0, of_scores)
        return beside - mlp_bytes(block.feed_forward, element_bytes=a, tp=plan.tp)

    return max((inside(block) for block in blocks_among(plan, blocks)), default=0)


def _of_others(config: Config, plan: RunPlan, block: BlockSpec) -> int:
    """Bytes that a block's attention has of context-parallel ranks, for each token of the rank's own."""
    if plan.cp == 1:
        return 0
    a = ELEMENT_BYTES[config.precision.dtype]
    keys_and_values = gathered_bytes(block, element_bytes=a, tp=plan.tp)
    if config.parallel.cp_kind == "ring":  # what is here and what comes, with fp32 gradients
        return 2 * keys_and_values + 2 * gathered_bytes(block, element_bytes=FP32_BYTES, tp=plan.tp)
    if config.parallel.cp_kind == "allgather":
        return COPIES_OF_OTHERS * plan.cp * keys_and_values
    return COPIES_OF_OTHERS * (a * block.attention.q_width // plan.tp + keys_and_values)


def norm_gradients(config: Config) -> int:
    """Gradients in fp32, as wide as the stream, that a norm has in its backward pass: four, and the one that came where
    that is no copy's."""
    return 4 + (ELEMENT_BYTES[config.precision.dtype] != FP32_BYTES)


def micro_batch_tokens(config: Config) -> int:
    """Those of a rank."""
    return stream_tokens(config) // config.parallel.cp


def stream_bytes(config: Config, plan: RunPlan) -> int:
    """Of a micro-batch's residual stream as a rank holds it: what one stage hands to the next, and what a recomputed
    block keeps. Ranks of tp have the whole of it each, or with sequence parallelism the rows of some tokens."""
    return ELEMENT_BYTES[config.precision.dtype] * own_tokens(config) * plan.model.hidden_size


def stream_width(config: Config, plan: RunPlan) -> int:
    """Elements of the residual stream that a rank holds for each token; sequence parallelism cuts the tokens."""
    return plan.model.hidden_size // (plan.tp if config.parallel.sequence_parallel else 1)
