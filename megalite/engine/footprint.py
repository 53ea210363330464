"""What an engine keeps of each parameter, and its buffers: arithmetic for the planner, without torch.

(DeepSpeed 0.19; ZeRO, Rajbhandari et al. 2020, section 3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.architecture.weights import by_parameter, vocab_rows_per_rank, weight_table
from megalite.config.engine import choose_engine
from megalite.config.optimizers import averages
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.config.weight_groups import is_trained
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.engine.wire_bytes import BLOCK, PIECE_BLOCKS, ROUNDED_BUCKET, UNDER_WAY, bytes_per_number

MASTER_BYTES = {"fp32": (0, 4, 4, 4), "bf16": (0, 4, 2, 0)}
"""Of a parameter, by ZeRO stage: the weight that is updated, beside the one that computes. Without ZeRO, and in bf16 at
stage 3, they are the same."""

GRADIENT_BYTES = {"fp32": (4, 4, 4, 4), "bf16": (2, 4 + 2, 4, 4), "fp16": (2, 2, 2, 2)}
"""Of a parameter's gradient, by ZeRO stage; stages 2 and 3 divide it by dp. bf16 accumulates in fp32, at stage 1
beside the bf16 gradient of the micro-batch."""

ZERO3_LIVE_PARAMETERS = 10**9
"""DeepSpeed's stage3_max_live_parameters: weights that stage 3 keeps gathered at most."""

ZERO3_PREFETCHED = 5 * 10**7
"""DeepSpeed's stage3_prefetch_bucket_size: weights of blocks that come in one message at most, which is there beside
what it is copied to until the last of them is used."""

ALLREDUCE_ELEMENTS = 5 * 10**8
"""DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE: gradient elements copied into one message where ZeRO has no bucket."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank of a pipeline stage."""

    weights: int
    """Those that compute."""
    gradients: int
    optimizer: int
    """Master weights and the optimizer's state."""
    buffers: int
    """Gradients on their way, weights that are gathered: through the whole step."""
    at_head: int = 0
    """The same while the loss works."""
    gathering: int = 0
    """The same besides while the next block's weights come."""
    in_blocks: int = 0
    """The same while a block works."""
    behind_one: int = 0
    """The same when a block's backward pass is over, and what it kept is gone."""
    in_second: int = 0
    """The same while the next block works."""
    behind_two: int = 0
    """The same when that is over, too."""
    of_head: int = 0
    """Of the head's gradient, what is there until the backward pass is over."""
    after_backward: int = 0
    """The same when the backward pass is over."""
    late_gradients: int = 0
    """Of gradients, what is not there before the step's first backward pass."""
    host: int = 0
    """In the host's memory, beside all this."""


class EngineNumbers(NamedTuple):
    """What an engine is given to keep on a rank."""

    parameters: int
    """Of the rank before ZeRO cuts them."""
    updated: int
    """Those whose masters ZeRO divides among the replicas: with expert parallelism more."""
    state_bytes: int
    """Of the optimizer's state of these, before ZeRO cuts it."""
    still: int = 0
    """Of the parameters those that are frozen, of which our own engine keeps nothing else."""
    still_updated: int = 0
    """The same of `updated`."""

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return self.parameters - self.still

    @property
    def masters(self) -> int:
        """Numbers that the replicas update together."""
        return self.updated - self.still_updated


def footprint(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    """What the engine of a config keeps on a rank."""
    engine = choose_engine(config)
    return {"native": _native, "fsdp2": _fsdp2, "deepspeed": _deepspeed}[engine](config, plan, numbers)


def _fsdp2(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    """Masters in fp32, and gradients and state of what is trained, all of it divided. Gathered is what is outside of
    blocks. Of blocks (torch 2.13), in the backward pass but for the first line:

        as the last one begins its forward pass: it as it has come and as it is used, and the one before as it has come
        at the head        the last one has come
        in the first       it is as it is used, the next one comes, and gradients of its last weights are there
        behind it          its gradients on their way (`_reducing`), and the next one
        in the second      as in the first; and the message, which is kept until the next is sent
        at its end         it, all its gradients, the next one and the message
        at the very end    as behind a block, for what is outside of blocks
    """
    element, replicas = ELEMENT_BYTES[config.precision.dtype], plan.num_replicas // config.parallel.dp_replicate
    root, head = outer_parameters(plan), _head_parameters(config, plan)
    num_blocks = plan.model.num_layers + plan.model.num_predictions
    block = (numbers.parameters - root) // num_blocks
    trained = max(0, numbers.trained - (root if head else 0)) // num_blocks
    last = min(_last_of_block(plan), trained)
    gathered, reduced = _rounded_block(config, block, trained, replicas)
    in_its_format = block * element // replicas if element < FP32_BYTES else 0  # of a rank's own, to be sent
    message, others = trained * _wire_bytes(config), [block if num_blocks > number else 0 for number in (1, 2)]
    behind = others[0] * element + _reducing(config, trained, replicas, last) + reduced
    rows, gradients = (count * FP32_BYTES // replicas for count in (numbers.updated, numbers.masters))
    state, hpz = numbers.state_bytes // replicas, config.parallel.hpz_size
    is_away = config.optimizer.offload and config.train.device != "cpu"  # where that is another memory
    is_late = plan.grad_accum_steps == 1 and not is_away
    sums = root * _wire_bytes(config) // replicas if is_late and head else 0  # counted among the gradients
    return Footprint(
        weights=0 if is_away else rows,
        gradients=0 if is_away else gradients,
        optimizer=0 if is_away else state,
        host=rows + gradients + state if is_away else 0,
        buffers=root * element + (0 if hpz is None else (numbers.parameters - root) * element // hpz),
        at_head=block * element,
        gathering=in_its_format + gathered,
        in_blocks=(block + others[0] + last) * element,
        behind_one=max(min(num_blocks + 1, 3) * block * element, behind),
        in_second=(block + others[1] + last) * element + message,
        behind_two=(block + others[1] + trained) * element + message,
        of_head=head * element,
        after_backward=_reducing(config, root, replicas, head) - root * element - sums if head else 0,
        late_gradients=gradients if is_late else 0,
    )


def _head_parameters(config: Config, plan: RunPlan) -> int:
    """Numbers of a rank in the head's matrix, where it is trained."""
    is_still = not is_trained("head.weight", config.optimizer)
    return 0 if is_still else vocab_rows_per_rank(plan.model.vocab_size, plan.tp) * plan.model.hidden_size


def outer_parameters(plan: RunPlan) -> int:
    """Numbers of a rank that are outside of blocks, where there is no pipeline."""
    outside = [weight for weight in weight_table(plan.model, blocks=()).values() if not weight.is_inner]
    return sum(prod(weight.local_shape(plan.tp)) for weight in outside)


def _wire_bytes(config: Config) -> int:
    """Of a gradient in a message that is not rounded to few bits."""
    return ELEMENT_BYTES[config.precision.reduce_dtype or "fp32"]


def _reducing(config: Config, num: int, replicas: int, last: int) -> int:
    """Bytes at most while so many gradients are added up: in order, and as they go; or as they go, as others send
    theirs (over gloo), as their sum, and those of the last parameter, which torch's loop still has."""
    element, wire = ELEMENT_BYTES[config.precision.dtype], _wire_bytes(config)
    received = wire if config.train.device == "cpu" and replicas > 1 else 0
    return max(num * (element + wire), num * (wire + received + wire // replicas) + last * element)


def _last_of_block(plan: RunPlan) -> int:
    """Numbers of a rank in the last parameter of the last block."""
    last = plan.model.num_layers - 1
    rows = {name: row for name, row in weight_table(plan.model, {last}).items() if row.layer == f"blocks.{last}"}
    of_last = by_parameter(rows).popitem()[1]
    return sum(prod(row.local_shape(plan.tp)) for row in of_last if row.is_held(plan.ep, 0))


def _rounded_block(config: Config, block: int, trained: int, replicas: int) -> tuple[int, int]:
    """What rounding needs of a block at a time: numbers in whole blocks of their own, and messages, of its weights and
    of its gradients. A piece of the numbers is made in fp32, and made again as it was."""
    element, precision = ELEMENT_BYTES[config.precision.dtype], config.precision
    gathered = reduced = 0.0
    if precision.gather_bits is not None and replicas > 1:
        gathered = block * (element + (1 + 1 / replicas) * bytes_per_number(precision.gather_bits))
        gathered += 2 * FP32_BYTES * min(block, PIECE_BLOCKS * BLOCK)
    if precision.reduce_bits is not None and replicas > 1:
        reduced = trained * (FP32_BYTES + 2 * bytes_per_number(precision.reduce_bits))
    return round(gathered), round(reduced)


def _native(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    """Sums of gradients in fp32, and masters where the weights are not; of what is frozen neither."""
    element, trained = ELEMENT_BYTES[config.precision.dtype], numbers.trained
    num_updated, state_bytes = numbers.masters, numbers.state_bytes
    offload, precision, replicas = config.optimizer.offload, config.precision, plan.num_replicas
    are_apart = element != FP32_BYTES or offload or (precision.gather_bits is not None and replicas > 1)
    masters = num_updated * FP32_BYTES if are_apart else 0
    wire = ELEMENT_BYTES[config.precision.reduce_dtype or "fp32"]
    kept = state_bytes + masters + (num_updated * FP32_BYTES if offload else 0)  # with the gradient's copy
    optimizer = kept // (plan.num_replicas if plan.sharding.optimizer else 1)
    is_away = offload and config.train.device != "cpu"  # where that is another memory
    return Footprint(
        weights=numbers.parameters * element,
        gradients=trained * FP32_BYTES,
        optimizer=0 if is_away else optimizer,
        host=optimizer if is_away else 0,
        buffers=trained * wire if replicas > 1 and wire != FP32_BYTES else 0,
        after_backward=_messages(config, plan, trained) if replicas > 1 else 0,
    )


def _messages(config: Config, plan: RunPlan, num_parameters: int) -> int:
    """What comes of the last buckets' gradients at the end of the backward pass, over gloo or in few bits, in which it
    is also sent; or of all weights in few bits, from the update to the layer that needs them, and of this replica's
    run."""
    precision, gradients, weights = config.precision, 0.0, 0.0
    num_under_way = min(num_parameters, (1 + UNDER_WAY) * ROUNDED_BUCKET)
    if precision.reduce_bits is not None:
        gradients = 2 * num_under_way * bytes_per_number(precision.reduce_bits)
    elif config.train.device == "cpu" and plan.sharding.optimizer:
        gradients = num_under_way * _wire_bytes(config)
    if precision.gather_bits is not None:
        weights = num_parameters * (1 + 1 / plan.num_replicas) * bytes_per_number(precision.gather_bits)
    return round(max(gradients, weights))


def _deepspeed(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    num_parameters, state_bytes = numbers.parameters, numbers.state_bytes
    dtype, zero, sharding = config.precision.dtype, config.parallel.zero_stage, plan.sharding
    element, masters = ELEMENT_BYTES[dtype], MASTER_BYTES[config.precision.master_dtype][zero]
    sends_themselves = zero == 0 or (zero == 1 and dtype == "bf16")
    if sends_themselves:  # the gradients are sent when all are there, copied message by message
        sent = at_the_end = min(num_parameters, ALLREDUCE_ELEMENTS) * FP32_BYTES if plan.num_replicas > 1 else 0
    else:
        bucket = deepspeed_config(config, plan)["zero_optimization"]["reduce_bucket_size"]
        sent, at_the_end = element * bucket, 0
        if not sharding.weights and plan.num_replicas > 1:
            at_the_end = element * min(num_parameters, bucket)  # its tensors, once more in a row
    gathered = 0
    if sharding.weights and plan.num_replicas > 1:
        in_blocks = num_parameters - outer_parameters(plan)
        gathered = element * (min(num_parameters, ZERO3_LIVE_PARAMETERS) + min(in_blocks, ZERO3_PREFETCHED))
    gradients = num_parameters * GRADIENT_BYTES[dtype][zero] // (plan.num_replicas if sharding.gradients else 1)
    is_late = zero == 2 and plan.grad_accum_steps == 1
    copied = 0  # while averages are evaluated; the other engines have memory of gradients for that
    if any(averages(name) for name in config.optimizer.names):
        copied = num_parameters * (masters or element) // (plan.num_replicas if sharding.optimizer else 1)
    return Footprint(
        weights=num_parameters * element // (plan.num_replicas if sharding.weights else 1),
        gradients=gradients,
        optimizer=(state_bytes + num_parameters * masters) // (plan.num_replicas if sharding.optimizer else 1),
        buffers=gathered + (0 if sends_themselves else sent),
        after_backward=max(at_the_end - (gradients if is_late else 0), copied),
        late_gradients=gradients if is_late else 0,
    )
