"""What a rank's process takes on a CPU, where tensors are not all of it.

    base       Python, PyTorch and what else is imported
    kernels    products that oneDNN has prepared for so many shapes (`train.fork_server`), and what a first step makes
    heap       tensors, and what lies free between them: glibc keeps what is freed, and later tensors fit it badly

The base of a process at hand can be measured; the other two are constants, which 45 configs with 0.05 to 3.7 GB of
tensors agree on (docs/benchmarks/plan.md).
"""

from __future__ import annotations

from megalite.config.engine import choose_engine
from megalite.config.schema import Config

BASE_BYTES = 340 * 10**6
"""Of a rank before it has a model: what has not even so much, nobody can start (`train.fit`)."""
KERNEL_BYTES = 135 * 10**6

HEAP = {"native": 1.22, "fsdp2": 1.9, "deepspeed": 1.9}
"""Bytes of the heap for one of tensors at their peak, by engine. FSDP2 was seen with 1.5 to 2.2, DeepSpeed with 1.5
without ZeRO and 2.5 at stage 3."""


def process_bytes(config: Config, tensors: int, base: int = BASE_BYTES) -> int:
    """The most that a rank's process takes.

    Args:
        tensors: bytes of them at the peak of a step, `StageMemory.total`.
        base: of the process before it has a model.
    """
    return base + KERNEL_BYTES + round(HEAP[choose_engine(config)] * tensors)
