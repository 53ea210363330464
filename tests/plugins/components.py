"""How much of the vocabulary a run has seen, over all ranks and restarts; it can end the run when that is enough."""

import torch
import torch.distributed as dist

from megalite import extend
from megalite.engine.protocol import StepResult
from megalite.parallel.collectives import all_reduce
from megalite.train.components.component import Component, Context, Step


@extend.component("coverage")
class Coverage(Component):
    def __init__(self, context: Context, *, enough: float = 1.0):
        self.axis, self.device, self.enough = context.axes.batch, context.device, enough
        self.seen = torch.zeros(context.plan.model.vocab_size, dtype=torch.int32, device=context.device)

    def measure(self, step: Step, result: StepResult) -> None:
        for batch in step.batches:
            self.seen[batch.tokens.flatten()] = 1
        self.seen = all_reduce(self.seen, self.axis, dist.ReduceOp.MAX)
        step.figures["coverage"] = self.share

    @property
    def share(self) -> float:
        return self.seen.float().mean().item()

    def stop_reason(self) -> str:
        return f"{self.share:.0%} of the vocabulary was seen" if self.share >= self.enough else ""

    def state(self) -> dict[str, list[int]]:
        return {"seen": self.seen.nonzero().flatten().tolist()}

    def load_state(self, state: dict[str, list[int]]) -> None:
        self.seen.zero_()
        self.seen[state.get("seen", [])] = 1
