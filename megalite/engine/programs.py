"""What one stage of a pipeline does in a step, by how many micro-batches it has; made when first asked for.

That all of them end is proven before any process starts (`config.pipeline`), and again here.
"""

from __future__ import annotations

from functools import cache

from megalite.config.pipeline import pipeline_schedule, proven_programs
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.parallel.schedules.operations import ChunkPlacement
from megalite.parallel.schedules.orders import forward_only
from megalite.parallel.schedules.programs import Program, make_programs


class Programs:
    """The programs of one stage.

    Args:
        stage: its number along the pipeline.
    """

    def __init__(self, config: Config, plan: RunPlan, stage: int):
        self._placement, self._stage = ChunkPlacement(plan.chunk_ranks), stage
        self.training = cache(
            lambda count: proven_programs(config, plan, pipeline_schedule(config, plan, count))[stage]
        )
        """Of a training step, given its number of micro-batches."""
        self.evaluation = cache(self._forward)
        """Of forward passes alone."""

    def _forward(self, num_micro_batches: int) -> Program:
        return make_programs(forward_only(self._placement, num_micro_batches))[self._stage]
