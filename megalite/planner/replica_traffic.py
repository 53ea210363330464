"""What a rank sends to its replicas in a step, by stage: gradients to be added up, and weights to compute with.

    engine      gradients                                        weights                               r replicas
    native 0    (r - 1) / r x 2 passes of reduce_dtype           none
                in few bits: one pass of them, one of sums
    native 1    (r - 1) / r                                      (r - 1) / r
                in two hops (w - 1) / w within, and as one of w between nodes
    FSDP2       (r - 1) / r a micro-batch                        (r - 1) / r, twice a micro-batch; what is outside of
                and twice a copy's share over groups             blocks once; with hpZ the second among fewer
    DeepSpeed   as FSDP2 with stages 2 and 3                     (r - 1) / r; with stage 3 as FSDP2

of the bytes of all numbers of a rank (Rajbhandari et al. 2020, section 7; ZeRO++, Wang et al. 2023). What stands behind
weights so that all ranks have equal runs, or blocks are whole, is left out: at most 255 numbers a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.architecture.costs import ELEMENT_BYTES
from megalite.config.engine import choose_engine
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.kept import exact_gradient_bytes, outer_parameters
from megalite.engine.wire_bytes import bytes_per_number
from megalite.planner.holdings import numbers_by_stage


@dataclass(frozen=True)
class ReplicaBytes:
    """Of a step."""

    reduced: float
    """Gradients, and sums of them."""
    gathered: float
    """Weights."""
    near: float = 0.0
    """Weights that come from `parallel.hpz_size` neighbours alone."""
    reduced_near: float = 0.0
    """Gradients that go to `parallel.reduce_within` neighbours, before their sums travel on."""
    between: float = 0.0
    """Sums of gradients, to those who have the same of other copies (`parallel.dp_replicate`)."""

    @property
    def total(self) -> float:
        return self.reduced + self.gathered + self.near + self.reduced_near + self.between


def gradient_bytes(config: Config, plan: RunPlan) -> float:
    """Of a gradient on the wire: where the config does not say, fp32, or with DeepSpeed's stages 2 and 3 the weights'
    format."""
    precision = config.precision
    if precision.reduce_bits is not None:
        return bytes_per_number(precision.reduce_bits)
    is_as_weights = choose_engine(config) == "deepspeed" and plan.sharding.gradients
    if precision.reduce_dtype is None and is_as_weights:
        return ELEMENT_BYTES[precision.dtype]
    return exact_gradient_bytes(config)


def weight_bytes(config: Config) -> float:
    """Of a weight on the wire."""
    bits = config.precision.gather_bits
    return ELEMENT_BYTES[config.precision.dtype] if bits is None else bytes_per_number(bits)


def replica_bytes(config: Config, plan: RunPlan, trained: int, gathered: int) -> ReplicaBytes:
    """What a rank sends.

    Args:
        trained: those of its numbers that have gradients.
        gathered: those that come from others, where these update them or keep them.
    """
    replicas = plan.num_replicas
    if replicas == 1:
        return ReplicaBytes(0.0, 0.0)
    share, gradient, weight = (replicas - 1) / replicas, gradient_bytes(config, plan), weight_bytes(config)
    near, far = _hops(config, replicas)
    if choose_engine(config) == "fsdp2":
        return _fsdp2(config, plan, trained, gathered)
    if not plan.sharding.optimizer:
        again = gradient if config.precision.reduce_bits is None else exact_gradient_bytes(config)
        return ReplicaBytes(trained * (far * gradient + share * again), 0.0, reduced_near=near * trained * gradient)
    if not plan.sharding.gradients:
        return ReplicaBytes(far * trained * gradient, share * gathered * weight, reduced_near=near * trained * gradient)
    count = plan.grad_accum_steps
    passes = 2 * count if plan.sharding.weights else 1
    return ReplicaBytes(share * count * trained * gradient, share * passes * gathered * weight)


def _hops(config: Config, replicas: int) -> tuple[float, float]:
    """Of a rank's gradients, the shares that it sends to neighbours, and then on to all others."""
    within = config.parallel.reduce_within
    if within is None:
        return 0.0, (replicas - 1) / replicas
    return (within - 1) / within, (replicas // within - 1) / replicas


def _fsdp2(config: Config, plan: RunPlan, trained: int, gathered: int) -> ReplicaBytes:
    copies, hpz, count = config.parallel.dp_replicate, config.parallel.hpz_size, plan.grad_accum_steps
    shards, again = plan.num_replicas // copies, gathered - gathered_once(config, plan)
    share = (shards - 1) / shards
    between = 2 * (copies - 1) / copies / shards  # a ring's all-reduce of what a rank has
    near, far = _hops(config, shards)
    reduced = trained * far * gradient_bytes(config, plan)
    summed = trained * between * gradient_bytes(config, plan)
    reduced_near = trained * near * gradient_bytes(config, plan)
    if hpz is None:
        from_near, from_all = 0.0, share * (gathered + again) * weight_bytes(config)
    else:
        from_near = again * (hpz - 1) / hpz * ELEMENT_BYTES[config.precision.dtype]
        from_all = share * gathered * weight_bytes(config)
    return ReplicaBytes(count * reduced, count * from_all, count * from_near, count * reduced_near, count * summed)


def bytes_by_stage(config: Config, plan: RunPlan) -> tuple[ReplicaBytes, ...]:
    """What the ranks of every stage send, first to last: nothing for what is frozen, but FSDP2's gathered weights and
    what DeepSpeed does not leave out. Experts, which fewer replicas share, count as others do."""
    return tuple(
        replica_bytes(config, plan, numbers.trained, numbers.parameters if plan.sharding.weights else numbers.trained)
        for numbers in numbers_by_stage(config, plan)
    )


def gathered_once(config: Config, plan: RunPlan) -> int:
    """Weights that a micro-batch gathers once, those outside of FSDP2's blocks; the others come again for the backward
    pass."""
    return outer_parameters(plan) if choose_engine(config) == "fsdp2" else 0
