"""Bytes that our own engine keeps (ZeRO, Rajbhandari et al. 2020, section 3)."""

from __future__ import annotations

from math import prod

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.architecture.weights import by_parameter, weight_table
from megalite.config.plan import PRODUCT_PIECE, RunPlan
from megalite.config.schema import Config
from megalite.engine.kept import EngineNumbers, Footprint, InBlocks, exact_gradient_bytes, has_gradient
from megalite.engine.wire_bytes import ROUNDED_BUCKET, UNDER_WAY, bytes_per_number


def footprint(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    """Sums of gradients in fp32, and masters where the weights are not; of what is frozen neither."""
    element, trained = ELEMENT_BYTES[config.precision.dtype], numbers.trained
    num_updated, state_bytes = numbers.masters, numbers.state_bytes
    offload, precision, replicas = config.optimizer.offload, config.precision, plan.num_replicas
    are_apart = element != FP32_BYTES or offload or (precision.gather_bits is not None and replicas > 1)
    masters = num_updated * FP32_BYTES if are_apart else 0
    wire = exact_gradient_bytes(config)
    kept = state_bytes + masters + (num_updated * FP32_BYTES if offload else 0)  # with the gradient's copy
    optimizer = kept // (plan.num_replicas if plan.sharding.optimizer else 1)
    is_away = offload and config.train.device != "cpu"  # where that is another memory
    return Footprint(
        weights=numbers.parameters * element,
        gradients=trained * FP32_BYTES,
        optimizer=0 if is_away else optimizer,
        host=optimizer if is_away else 0,
        buffers=trained * wire if replicas > 1 and wire != FP32_BYTES else 0,
        in_blocks=InBlocks(product=_largest_product(config, plan)),
        after_backward=_messages(config, plan, trained) if replicas > 1 else 0,
    )


def _largest_product(config: Config, plan: RunPlan) -> int:
    """Of a CPU's largest gradient in few bits, in them and in fp32, or of the piece of it that is made at once. A GPU's
    product adds itself to the sum, and so does one in fp32."""
    element = ELEMENT_BYTES[config.precision.dtype]
    if config.train.device != "cpu" or element == FP32_BYTES:
        return 0
    kinds = plan.model.kinds()
    inner = weight_table(plan.model, {kinds.index(kind) for kind in kinds}).values()
    joined = by_parameter({row.name: row for row in inner if row.is_inner and has_gradient(row.name, config)})
    largest = max((sum(prod(row.local_shape(plan.tp)) for row in rows) for rows in joined.values()), default=0)
    precision = config.precision
    has_scales = precision.qat is not None and precision.qat.learned_scales
    is_whole = precision.fp8 is not None or precision.fp4 is not None or has_scales
    return (element + FP32_BYTES) * (largest if is_whole else min(largest, PRODUCT_PIECE))


def _messages(config: Config, plan: RunPlan, num_parameters: int) -> int:
    """What comes of the last buckets' gradients at the end of the backward pass, over gloo or in few bits, in which it
    is also sent; or of all weights in few bits, from the update to the layer that needs them, and of this replica's
    run."""
    precision, gradients, weights = config.precision, 0.0, 0.0
    num_under_way = min(num_parameters, (1 + UNDER_WAY) * ROUNDED_BUCKET)
    if precision.reduce_bits is not None:
        gradients = 2 * num_under_way * bytes_per_number(precision.reduce_bits)
    elif config.train.device == "cpu" and plan.sharding.optimizer:
        gradients = num_under_way * exact_gradient_bytes(config)
    if precision.gather_bits is not None:
        weights = num_parameters * (1 + 1 / plan.num_replicas) * bytes_per_number(precision.gather_bits)
    return round(max(gradients, weights))
