"""What a rank sends in a step over each kind of parallelism, by stage, before anything runs.

Bytes of the residual stream that a ring sends, and gradients of what makes latents, which all tp ranks hold whole. Left
out are those of norms (some thousand numbers a micro-batch), and the borders of documents that go with the stream. What
replicas send is the engine's choice: `replica_traffic`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from megalite.architecture.architecture import BlockSpec
from megalite.architecture.attention_costs import context_sent_bytes, latent_width
from megalite.architecture.costs import (
    ELEMENT_BYTES,
    block_sent_bytes,
    dispatch_sent_bytes,
    embedding_sent_bytes,
    head_sent_bytes,
    round_trip,
)
from megalite.config.plan import RunPlan
from megalite.config.recompute import recompute_by_block
from megalite.config.schema import Config
from megalite.config.stream import own_tokens, stream_tokens
from megalite.planner.block_memory import stream_bytes
from megalite.planner.replica_traffic import bytes_by_stage


@dataclass(frozen=True)
class StageTraffic:
    """Bytes that each rank of a stage sends in a step."""

    stage: int
    tp: int
    """To the other ranks of its tensor-parallel group."""
    cp: int
    """To those that have other tokens of the same micro-batches; a compiled block that recomputes nothing sends a third
    less by allgather."""
    pp: int
    """To other stages: streams forward, their gradients back."""
    ep: int
    """To the ranks of other experts, where tokens choose all of them as often: tokens, results, and their gradients."""
    dp: int
    """To its replicas: gradients and weights."""

    def to_dict(self) -> dict[str, int]:
        """A JSON-ready form."""
        return asdict(self)


def traffic_by_stage(config: Config, plan: RunPlan) -> tuple[StageTraffic, ...]:
    """What the ranks of every stage send, first to last."""
    tokens = stream_tokens(config) // plan.cp * plan.grad_accum_steps
    by_axis = [[tokens * measure(config, plan, stage) for measure in MEASURES] for stage in range(plan.pp)]
    over_replicas = [sent.total for sent in bytes_by_stage(config, plan)]
    return tuple(StageTraffic(stage, *map(round, (*by_axis[stage], over_replicas[stage]))) for stage in range(plan.pp))


def num_predictions(plan: RunPlan, stage: int) -> int:
    """Layers that predict further ahead on the ranks of a stage."""
    return plan.model.num_predictions if stage == plan.chunk_ranks[-1] else 0


def blocks_of(plan: RunPlan, stage: int) -> list[BlockSpec]:
    """The blocks of a stage, those that predict further among them."""
    return [plan.model.block(index) for index in _indices(plan, stage)]


def _indices(plan: RunPlan, stage: int) -> list[int]:
    """Their numbers."""
    first = plan.model.num_layers
    return [*plan.blocks_of(stage), *range(first, first + num_predictions(plan, stage))]


def _with_modes(config: Config, plan: RunPlan, stage: int) -> Iterator[tuple[BlockSpec, str]]:
    """The same blocks, and what each makes again."""
    modes, indices = recompute_by_block(config, plan), _indices(plan, stage)
    return zip(blocks_of(plan, stage), (modes[index] for index in indices), strict=True)


def _tp_bytes(config: Config, plan: RunPlan, stage: int) -> float:
    """Of one token."""
    model, tp, element_bytes = plan.model, plan.tp, ELEMENT_BYTES[config.precision.dtype]
    tokens, chunk = own_tokens(config), config.train.mlp_chunk_tokens
    last_chunk = None if chunk is None else ((tokens - 1) % chunk + 1) / tokens
    sent = sum(
        block_sent_bytes(
            block,
            model.hidden_size,
            element_bytes=element_bytes,
            tp=tp,
            sequence_parallel=config.parallel.sequence_parallel,
            recompute=mode,
            last_chunk=last_chunk,
        )
        for block, mode in _with_modes(config, plan, stage)
    )
    if config.parallel.sequence_parallel:  # each rank makes a part of the gradient of what makes latents, or joins
        latents = sum(latent_width(block.attention) for block in blocks_of(plan, stage))
        joining = 2 * model.hidden_size * num_predictions(plan, stage)
        sent += round_trip(element_bytes * model.hidden_size * (latents + joining), tp) / (
            stream_tokens(config) // plan.cp
        )
    further = num_predictions(plan, stage)  # with embedding and head once more
    if num_embeddings := further + (stage == plan.chunk_ranks[0]):
        sent += num_embeddings * embedding_sent_bytes(model.hidden_size, element_bytes=element_bytes, tp=tp)
    if num_heads := further + (stage == plan.chunk_ranks[-1]):
        sent += num_heads * head_sent_bytes(model.hidden_size, element_bytes=element_bytes, tp=tp)
    return sent


def _cp_bytes(config: Config, plan: RunPlan, stage: int) -> float:
    """Of one token of the rank's own."""
    if plan.cp == 1:
        return 0.0
    return sum(
        context_sent_bytes(
            block,
            kind=config.parallel.cp_kind,
            element_bytes=ELEMENT_BYTES[config.precision.dtype],
            cp=plan.cp,
            tp=plan.tp,
            recompute=mode,
        )
        for block, mode in _with_modes(config, plan, stage)
    )


def _ep_bytes(config: Config, plan: RunPlan, stage: int) -> float:
    """Of one token of the rank's own."""
    return sum(
        dispatch_sent_bytes(
            block.feed_forward,
            plan.model.hidden_size,
            element_bytes=ELEMENT_BYTES[config.precision.dtype],
            ep=plan.ep,
            recompute=mode,
        )
        for block, mode in _with_modes(config, plan, stage)
    )


def _pp_bytes(config: Config, plan: RunPlan, stage: int) -> float:
    """Of one token: of each border the stage has the stream to send, or its gradient."""
    return plan.cuts_of(stage) * stream_bytes(config, plan) / (stream_tokens(config) // plan.cp)


MEASURES = (_tp_bytes, _cp_bytes, _pp_bytes, _ep_bytes)
"""In the order of the fields of `StageTraffic`, `dp` left out."""
