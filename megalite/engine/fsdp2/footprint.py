"""Bytes that FSDP2 keeps (torch 2.13): masters in fp32, and gradients and state of what is trained, all of it divided.

Gathered is what is outside of blocks, and of blocks, in the backward pass:

    at the head            the last one has come
    in the first           it is as it is used, the next one comes, and gradients of its last weights are there
    behind it              its gradients on their way (`_reducing`), and the next one
    in the second          as in the first; and the message, which is kept until the next is sent
    behind the second      it, all its gradients, the next one and the message
    at the very end        as behind a block, for what is outside of blocks

At the very start that is there as it has come and as it is used, and the first block, too; and as the last one begins
its forward pass, it as it has come and as it is used, and the one before as it has come.
"""

from __future__ import annotations

from math import prod

from megalite.architecture.costs import ELEMENT_BYTES, FP32_BYTES
from megalite.architecture.weights import by_parameter, weight_table
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.engine.kept import (
    EngineNumbers,
    Footprint,
    InBlocks,
    exact_gradient_bytes,
    head_numbers,
    outer_parameters,
)
from megalite.engine.wire_bytes import BLOCK, PIECE_BLOCKS, bytes_per_number


def footprint(config: Config, plan: RunPlan, numbers: EngineNumbers) -> Footprint:
    """What a rank keeps, and what it has beside that at each of the moments above."""
    element, shards = ELEMENT_BYTES[config.precision.dtype], _num_shards(config, plan)
    root, head = outer_parameters(plan), head_numbers(config, plan)
    rows, gradients = (count * FP32_BYTES // shards for count in (numbers.updated, numbers.masters))
    state, hpz = numbers.state_bytes // shards, config.parallel.hpz_size
    is_away = config.optimizer.offload and config.train.device != "cpu"  # where that is another memory
    is_late = plan.grad_accum_steps == 1 and not is_away
    # Sums of what is reduced last are counted among the gradients
    sums = root * exact_gradient_bytes(config) // shards if is_late else 0
    rounding, reduced = _rounding(config, root, root, shards)
    at_the_end = _reducing(config, root, shards, head) + reduced - root * element - sums if head else 0
    block = (numbers.parameters - root) // (plan.model.num_layers + plan.model.num_predictions)
    at_the_start = max(rounding, (root + 2 * block) * element) - (gradients if is_late else 0)
    return Footprint(
        weights=0 if is_away else rows,
        gradients=0 if is_away else gradients,
        optimizer=0 if is_away else state,
        host=rows + gradients + state if is_away else 0,
        buffers=root * element + (0 if hpz is None else (numbers.parameters - root) * element // hpz),
        in_blocks=_in_blocks(config, plan, numbers),
        after_backward=max(at_the_end, at_the_start),
        late_gradients=gradients if is_late else 0,
    )


def _in_blocks(config: Config, plan: RunPlan, numbers: EngineNumbers) -> InBlocks:
    element, shards = ELEMENT_BYTES[config.precision.dtype], _num_shards(config, plan)
    root, head = outer_parameters(plan), head_numbers(config, plan)
    num_blocks = plan.model.num_layers + plan.model.num_predictions
    numbers_of_block = (numbers.parameters - root) // num_blocks
    trained = max(0, numbers.trained - (root if head else 0)) // num_blocks
    block, gradients, message = numbers_of_block * element, trained * element, trained * exact_gradient_bytes(config)
    last = min(_last_of_block(plan), trained)
    gathered, reduced = _rounding(config, numbers_of_block, trained, shards)
    in_its_format = block // shards if element < FP32_BYTES else 0  # of a rank's own, to be sent
    following, after_that = (block if num_blocks > count else 0 for count in (1, 2))
    return InBlocks(
        at_head=block,
        coming=in_its_format + gathered,
        first=block + following + last * element,
        behind_first=max(
            min(num_blocks + 1, 3) * block,  # of the forward pass
            following + _reducing(config, trained, shards, last) + reduced,
        ),
        second=block + after_that + last * element + message,
        behind_second=block + after_that + gradients + message,
        head_gradient=head * element,
    )


def _num_shards(config: Config, plan: RunPlan) -> int:
    return plan.num_replicas // config.parallel.dp_replicate


def _reducing(config: Config, num: int, shards: int, last: int) -> int:
    """Bytes at most while so many gradients are added up: in order, and as they go; or as they go, as others send
    theirs (over gloo), as their sum, and those of the last parameter, which torch's loop still has."""
    element, wire = ELEMENT_BYTES[config.precision.dtype], exact_gradient_bytes(config)
    received = wire if config.train.device == "cpu" and shards > 1 else 0
    return max(num * (element + wire), num * (wire + received) + num * wire // shards + last * element)


def _last_of_block(plan: RunPlan) -> int:
    """Numbers of a rank in the last parameter of the last block."""
    last = plan.model.num_layers - 1
    rows = {name: row for name, row in weight_table(plan.model, {last}).items() if row.layer == f"blocks.{last}"}
    of_last = by_parameter(rows).popitem()[1]
    return sum(prod(row.local_shape(plan.tp)) for row in of_last if row.is_held(plan.ep, 0))


def _rounding(config: Config, block: int, trained: int, shards: int) -> tuple[int, int]:
    """What rounding needs of a block: numbers in whole blocks of their own, and messages, of its weights and
    of its gradients. A piece of the numbers is made in fp32, and made again as it was."""
    element, precision = ELEMENT_BYTES[config.precision.dtype], config.precision
    gathered = reduced = 0.0
    if precision.gather_bits is not None and shards > 1:
        gathered = block * (element + (1 + 1 / shards) * bytes_per_number(precision.gather_bits))
        gathered += 2 * FP32_BYTES * min(block, PIECE_BLOCKS * BLOCK)
    if precision.reduce_bits is not None and shards > 1:
        reduced = trained * (FP32_BYTES + 2 * bytes_per_number(precision.reduce_bits))
    return round(gathered), round(reduced)
