"""How much of a step's tokens lie in documents that are at least so long."""

import torch

from megalite import extend
from megalite.engine.protocol import StepResult
from megalite.parallel.collectives import all_reduce
from megalite.train.components.component import Context, Step


@extend.metric("share_in_long_documents")
def share_in_long_documents(step: Step, result: StepResult, context: Context, *, min_tokens: int = 16) -> float:
    lengths = [length for batch in step.batches for length in batch.cu_seqlens.diff().tolist()]
    sums = torch.tensor([sum(each for each in lengths if each >= min_tokens), sum(lengths)], device=context.device)
    long, tokens = all_reduce(sums, context.axes.batch).tolist()
    return long / tokens
