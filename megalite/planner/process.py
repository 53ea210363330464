"""What a rank's process takes on a CPU, where tensors are not all of it.

    base       Python, PyTorch and what else is imported
    kernels    pages of libraries that steps run, and products that oneDNN has prepared for so many shapes
    tensors    at their peak
    holes      what lies free between these: by engine a share of them, or what shapes of products that change make

The base of a process at hand can be measured. The rest are constants, found from processes of real runs
(`tools/benchmarks/plan_memory.py`; docs/benchmarks/plan.md says how far off each was when it was left out of the fit).
"""

from __future__ import annotations

from megalite.config.schema import Config
from megalite.engine.footprint import holes_per_byte

BASE_BYTES = 315 * 10**6
"""Of a rank that has been forked and has all imports: what has not even so much, nobody can start (`train.fit`)."""
KERNEL_BYTES = 145 * 10**6
"""75 MB of libraries' code, and 256 products of 0.26 MB (`train.fork_server` says how many are kept)."""

LONG_TOKENS = 2048
HOLES_OF_LONG, HOLES_OF_EXPERTS = 180 * 10**6, 75 * 10**6
"""Bytes at least where nearly every product has a shape of its own: attention in sequences of more tokens than those
above, whose documents are of ever new lengths, and experts, who are given ever new numbers of tokens. A product that is
prepared lies among the activations of its step, and those of the next do not fit around it."""


def process_bytes(config: Config, tensors: int, base: int = BASE_BYTES) -> int:
    """The most that a rank's process takes.

    Args:
        tensors: bytes of them at the peak of a step, `StageMemory.total`.
        base: of the process before it has a model.
    """
    return base + KERNEL_BYTES + tensors + max(round(holes_per_byte(config) * tensors), _beside_shapes(config))


def _beside_shapes(config: Config) -> int:
    """Bytes that lie free beside prepared products, at least."""
    batch = config.batch
    longest = max(batch.seq_len, *(stage.seq_len or 0 for stage in batch.stages), 0)
    if longest > LONG_TOKENS:
        return HOLES_OF_LONG
    return HOLES_OF_EXPERTS if config.model.moe is not None else 0
