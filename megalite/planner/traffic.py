"""What a rank sends in a step over tensor and pipeline parallelism, stage by stage, before anything runs.

Bytes of the residual stream that a ring sends. Left out are the gradients of weights that all tp ranks hold whole
(norms: some thousand numbers a micro-batch), and the borders of documents that go with the stream. What data
parallelism sends is the engine's choice, and not counted here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megalite.architecture.costs import (
    ELEMENT_BYTES,
    block_sent_bytes,
    embedding_sent_bytes,
    head_sent_bytes,
)
from megalite.config.plan import RunPlan
from megalite.config.schema import Config


@dataclass(frozen=True)
class StageTraffic:
    """Bytes that each rank of a stage sends in a step."""

    stage: int
    tp: int
    """To the other ranks of its tensor-parallel group."""
    pp: int
    """To other stages: streams forward, their gradients back."""

    def to_dict(self) -> dict[str, int]:
        """A JSON-ready form."""
        return asdict(self)


def traffic_by_stage(config: Config, plan: RunPlan) -> tuple[StageTraffic, ...]:
    """What the ranks of every stage send, first to last."""
    tokens = config.batch.micro_batch_size * config.batch.seq_len * plan.grad_accum_steps
    return tuple(
        StageTraffic(
            stage, round(tokens * _tp_bytes(config, plan, stage)), round(tokens * _pp_bytes(config, plan, stage))
        )
        for stage in range(plan.pp)
    )


def _tp_bytes(config: Config, plan: RunPlan, stage: int) -> float:
    """Of one token."""
    model, tp, element_bytes = plan.model, plan.tp, ELEMENT_BYTES[config.precision.dtype]
    sent = sum(
        block_sent_bytes(
            model.blocks[index],
            model.hidden_size,
            element_bytes=element_bytes,
            tp=tp,
            sequence_parallel=config.parallel.sequence_parallel,
            recompute=config.train.recompute,
        )
        for index in plan.blocks_of(stage)
    )
    if stage == plan.chunk_ranks[0]:
        sent += embedding_sent_bytes(model.hidden_size, element_bytes=element_bytes, tp=tp)
    if stage == plan.chunk_ranks[-1]:
        sent += head_sent_bytes(model.hidden_size, element_bytes=element_bytes, tp=tp)
    return sent


def _pp_bytes(config: Config, plan: RunPlan, stage: int) -> float:
    """Of one token: of each border the stage has the stream to send, or its gradient."""
    width = plan.model.hidden_size / (plan.tp if config.parallel.sequence_parallel else 1)
    return ELEMENT_BYTES[config.precision.dtype] * width * plan.cuts_of(stage)
