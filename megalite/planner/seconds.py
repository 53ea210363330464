"""Seconds of a step on a machine, before anything runs, and what they go into.

    products     matrix products of the blocks and of the head       FLOPs / (peak x products)
    attention    queries with keys, weights with values              FLOPs / (peak x products x ATTENTION_RATE)
    passes       norms, activations, what is added, the loss         bytes / (bandwidth x passes)
    tp, cp, ep   what ranks of a micro-batch send                    bytes / (link x links): nothing hides them
    offload      inputs of blocks to the host's memory and back      bytes / (host link x links), behind its work
    host         what the device's own work does not hide            overhead
    pp, bubble   messages between stages, and waiting for them       from the schedule itself (`schedules.simulation`)
    dp           gradients and weights over the replicas             what the backward pass does not hide
    optimizer    masters and moments, read and written               bytes / (bandwidth x passes)

FLOPs and bytes are those of the one table of costs (`architecture.costs`, `planner.traffic`). The four constants are
the machine's. Sources: Narayanan et al. 2021 (Megatron-LM, sections 3 and 5), Korthikanti et al. 2022, Rajbhandari et
al. 2020 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from megalite.architecture.architecture import BlockSpec, FeedForwardSpec
from megalite.architecture.attention_costs import context_sent_bytes, mixing_multiply_adds
from megalite.architecture.costs import (
    ELEMENT_BYTES,
    FP32_BYTES,
    BlockCut,
    block_activation_bytes,
    block_sent_bytes,
    dispatch_sent_bytes,
    linear_multiply_adds,
    linear_numbers,
    linear_weights,
)
from megalite.architecture.weights import vocab_rows_per_rank
from megalite.config.pipeline import few_rounds, pipeline_schedule
from megalite.config.plan import RunPlan
from megalite.config.recompute import recompute_by_block
from megalite.config.schema import Config
from megalite.config.stream import stream_tokens
from megalite.parallel.schedules.simulation import ChunkCosts, Timeline, simulate
from megalite.planner.holdings import numbers_by_stage, parameters_by_stage
from megalite.planner.machines import Machine
from megalite.planner.memory import is_compiled
from megalite.planner.replica_traffic import gradient_bytes, weight_bytes

Parts = dict[str, float]
"""Seconds, by what they go into."""

ATTENTION_RATE = 0.6
"""Of attention kernels, over that of large products (FlashAttention-2, Dao 2023, figures 5 and 6: 0.5 to 0.7)."""
ATTENTION_BACKWARD = 2.5
"""Products of attention's backward pass over its forward pass's; the scores are made again."""
PASSES_FORWARD, PASSES_BACKWARD = 2.0, 3.0
"""What a pass reads and writes over what is kept: once each, and twice read and once written."""
LOGIT_BYTES = 12.0
"""Of a logit, in all passes of the loss."""
UNFUSED_PASSES = 8.0
"""Scores read or written in a forward pass of attention that writes them: product, scale and mask, softmax, dropout."""


@dataclass(frozen=True)
class Practice:
    """What software does beside what a layout says. The defaults are ours; other people's runs had others."""

    fused_attention: bool = True
    """Scores are never written (FlashAttention)."""
    skips_hidden: bool = True
    """Scores of later tokens are never made."""
    hides_reductions: bool = True
    """Gradients travel behind the backward pass."""
    redoes_attention: bool = False
    """Selective recomputation makes the inside of attention again (Korthikanti et al. 2022); ours keeps its result and
    makes norms and activations again."""
    gradient_bytes: float = FP32_BYTES
    """Of a gradient on the wire."""
    visible_messages: float = 1.0
    """Of messages between ranks of a micro-batch, the share that products do not hide; ours hide none."""


OURS = Practice()


@dataclass(frozen=True)
class StepTime:
    """What a step is said to take."""

    seconds: float
    parts: Parts
    """Of the stage that works longest; with the bubble they add up to the whole."""


def step_time(config: Config, plan: RunPlan, machine: Machine, practice: Practice = OURS) -> StepTime:
    """Time of a step of the full batch."""
    count, chunks = plan.grad_accum_steps, _chunks(config, plan, machine, practice)
    work = [_sum(chunks[chunk].whole for chunk in plan.chunks_of(stage)) for stage in range(plan.pp)]
    longest = max(range(plan.pp), key=lambda stage: sum(work[stage].values()))
    parts = _times(work[longest], count)
    if plan.pp > 1:
        message = _stream_bytes(config, plan) / _rate_over(plan, machine, "pp")
        parts["pp"] = count * plan.cuts_of(longest) * message
        end = _end_of_pipeline(config, plan, chunks, message)
        parts["bubble"] = max(0.0, end - sum(parts.values()))
    parts |= _between_steps(config, plan, machine, practice, backward=sum(work[longest].values()) * 2 / 3)
    return StepTime(sum(parts.values()), parts)


def micro_batch_seconds(config: Config, plan: RunPlan, machine: Machine) -> float:
    """Of one micro-batch through the whole model, both ways."""
    return sum(seconds for chunk in _chunks(config, plan, machine, OURS) for seconds in chunk.whole.values())


@dataclass(frozen=True)
class _Chunk:
    """A micro-batch in a chunk of a pipeline."""

    forward: Parts
    backward: Parts
    weights: float
    """Seconds of the backward pass that are the weights' gradients."""

    @property
    def whole(self) -> Parts:
        return _sum((self.forward, self.backward))


def _chunks(config: Config, plan: RunPlan, machine: Machine, practice: Practice) -> list[_Chunk]:
    """Every chunk of the pipeline; blocks that are alike are counted once."""
    model, kinds, found = plan.model, plan.model.kinds(), list[_Chunk]()
    modes = recompute_by_block(config, plan)
    kinds_and_modes = list(zip(kinds, modes, strict=False))  # of the model's own
    known = {
        (kind, mode): _block(config, plan, model.block(kinds.index(kind)), machine, practice, mode)
        for kind, mode in set(kinds_and_modes)
    }
    for number, bounds in enumerate(plan.chunk_blocks):
        blocks = [known[each] for each in kinds_and_modes[slice(*bounds)]]
        is_last = number == len(plan.chunk_blocks) - 1
        if is_last and model.num_predictions:
            last = model.block(model.num_layers)
            blocks += [_block(config, plan, last, machine, practice, mode) for mode in modes[model.num_layers :]]
        head = _head(config, plan, machine) if is_last else {}
        # Pairs of answers: the model's own forward pass once more, and the reference's
        passes = 1 if config.train.preference is None else 3
        found.append(
            _Chunk(
                _sum([*(each.forward for each in blocks), head] * passes),
                _sum(each.backward for each in blocks),
                sum(each.weights for each in blocks),
            )
        )
    return found


def _block(
    config: Config, plan: RunPlan, block: BlockSpec, machine: Machine, practice: Practice, recompute: str
) -> _Chunk:
    """One block's passes over a micro-batch of a rank."""
    hidden, a = plan.model.hidden_size, ELEMENT_BYTES[config.precision.dtype]
    tokens, rate = _tokens(config, plan), machine.rate(config.precision.dtype)
    linear = 2.0 * tokens * linear_multiply_adds(block, hidden) / plan.tp / _rate_of_linear(config, machine)
    numbers = tokens * linear_numbers(block, hidden, plan.tp) + linear_weights(block, hidden, plan.ep) / plan.tp
    linear += a * numbers / machine.memory_bandwidth
    spans = 2.0 * tokens * mixing_multiply_adds(block.attention, config.batch.seq_len) / plan.tp
    attention = (1.0 if practice.skips_hidden else 2.0) * spans / (rate * ATTENTION_RATE)
    cut = BlockCut(plan.tp, config.parallel.sequence_parallel)
    kept = tokens * block_activation_bytes(block, hidden, element_bytes=a, cut=cut)
    bandwidth = machine.memory_bandwidth * machine.constants.passes
    scores = 0.0
    if not practice.fused_attention:
        scores = UNFUSED_PASSES * a * tokens * config.batch.seq_len * block.attention.num_heads / plan.tp / bandwidth
    passes = PASSES_FORWARD * kept / bandwidth
    visible = practice.visible_messages / 2
    sent = {axis: seconds * visible for axis, seconds in _sent(config, plan, block, machine).items()}
    forward = {"products": linear, "attention": attention, "passes": passes + scores, **sent}
    copy = _copy_seconds(config, plan, machine)
    forward["offload"] = max(0.0, copy - sum(forward.values()))
    forward["host"] = _host(machine, forward)
    backward = {
        "products": (2 if plan.model.lora is None else 1) * linear,  # without gradients of what is frozen
        "attention": ATTENTION_BACKWARD * attention,
        "passes": PASSES_BACKWARD / PASSES_FORWARD * passes + 2 * scores,
        **sent,
    }
    backward["offload"] = max(0.0, copy - sum(backward.values()))
    backward["host"] = _host(machine, backward, passes=2)
    if recompute == "full":
        backward = _sum((backward, forward))
    elif recompute == "selective" and is_compiled(config, plan):
        pass  # what is made again is fused into what needs it
    elif recompute == "selective" and practice.redoes_attention:
        backward = _sum((backward, {"attention": attention, "passes": scores}))
    elif recompute == "selective":
        backward = _sum((backward, {"passes": passes}))
    return _Chunk(forward, backward, linear if plan.model.lora is None else 0.0)


def _copy_seconds(config: Config, plan: RunPlan, machine: Machine) -> float:
    """Of a block's input to the host's memory, or back, where it waits there for the backward pass."""
    if not config.train.offload_activations or machine.host_link is None:
        return 0.0
    return _stream_bytes(config, plan) / (machine.host_link * machine.constants.links)


def _host(machine: Machine, device: Parts, passes: int = 1) -> float:
    """Seconds of the host that a device which is given work ahead has to wait for; a CPU is host and device in one."""
    overhead = passes * machine.constants.overhead
    return max(0.0, overhead - sum(device.values())) if machine.hides_messages else overhead


def _rate_of_linear(config: Config, machine: Machine) -> float:
    if config.precision.is_emulated:
        return machine.rate("fp32")
    return machine.rate(config.precision.dtype if config.precision.fp8 is None else "fp8")


def _sent(config: Config, plan: RunPlan, block: BlockSpec, machine: Machine) -> Parts:
    """Seconds of a block's messages to the ranks that have parts of the same micro-batch, there and back. Each waits to
    begin as a block does."""
    a, tokens, parallel = ELEMENT_BYTES[config.precision.dtype], _tokens(config, plan), config.parallel
    hidden, found, waits = plan.model.hidden_size, Parts(), machine.constants.overhead
    if plan.tp > 1:
        sent = block_sent_bytes(
            block, hidden, element_bytes=a, tp=plan.tp, sequence_parallel=parallel.sequence_parallel
        )
        messages, share = (8, machine.halves) if parallel.sequence_parallel else (4, 1.0)
        found["tp"] = tokens * sent / _rate_over(plan, machine, "tp") / share + messages * waits
    if plan.cp > 1:
        sent = context_sent_bytes(block, kind=parallel.cp_kind, element_bytes=a, cp=plan.cp, tp=plan.tp)
        messages = 3 if parallel.cp_kind == "allgather" else 2 * plan.cp
        found["cp"] = tokens * sent / _rate_over(plan, machine, "cp") + messages * waits
    if plan.ep > 1 and not isinstance(block.feed_forward, FeedForwardSpec):
        sent = dispatch_sent_bytes(block.feed_forward, hidden, element_bytes=a, ep=plan.ep)
        found["ep"] = tokens * sent / _rate_over(plan, machine, "ep") + EP_MESSAGES * waits
    return found


EP_MESSAGES = 5
"""How many rows come, rows and results there and back, and their gradients likewise."""


def _head(config: Config, plan: RunPlan, machine: Machine) -> Parts:
    """The head with its loss, whose gradients are made in the forward pass; once more for each further prediction."""
    rows = vocab_rows_per_rank(plan.model.vocab_size, plan.tp)
    logits = _tokens(config, plan) * rows * (1 + plan.model.num_predictions)
    operations = (6.0 if plan.model.lora is None else 4.0) * logits * plan.model.hidden_size
    return {
        "products": operations / machine.rate(config.precision.dtype),
        "passes": LOGIT_BYTES * logits / (machine.memory_bandwidth * machine.constants.passes),
    }


def step_timeline(config: Config, plan: RunPlan, machine: Machine) -> Timeline:
    """When each stage does what in a step, in seconds; without what stands between steps."""
    costs = _costs(_chunks(config, plan, machine, OURS))
    message = _stream_bytes(config, plan) / _rate_over(plan, machine, "pp")
    return simulate(pipeline_schedule(config, plan, plan.grad_accum_steps), costs, link=message)


def _costs(chunks: list[_Chunk]) -> tuple[ChunkCosts, ...]:
    return tuple(
        ChunkCosts(
            forward=sum(each.forward.values()),
            input_gradient=sum(each.backward.values()) - each.weights,
            weight_gradient=each.weights,
        )
        for each in chunks
    )


def _end_of_pipeline(config: Config, plan: RunPlan, chunks: list[_Chunk], message: float) -> float:
    """When the last pass of a step ends. Beyond some rounds a schedule repeats itself, so only these are simulated."""
    count, costs = plan.grad_accum_steps, _costs(chunks)
    few = count if plan.own_schedule is not None else few_rounds(count, plan.pp)
    timeline = simulate(pipeline_schedule(config, plan, few), costs, link=message)
    steady = max(
        sum(costs[chunk].forward + costs[chunk].seconds("B") for chunk in plan.chunks_of(stage))
        for stage in range(plan.pp)
    )
    return timeline.end + (count - few) * steady


def _between_steps(config: Config, plan: RunPlan, machine: Machine, practice: Practice, *, backward: float) -> Parts:
    """What the replicas send, where the passes do not hide it, and the update.

    Args:
        backward: seconds of the last micro-batch's backward pass, behind which gradients may travel.
    """
    found, replicas = Parts(), plan.num_replicas
    of_stages = numbers_by_stage(config, plan)
    numbers, updated = max(each.trained for each in of_stages), max(each.masters for each in of_stages)
    a, states = ELEMENT_BYTES[config.precision.dtype], max(each.state_bytes for each in of_stages)
    if replicas > 1:
        once = (replicas - 1) / replicas * numbers / _rate_over(plan, machine, "dp")
        hops = HOP_SECONDS * (replicas - 1)
        reduced = practice.gradient_bytes * once
        if config.precision.reduce_bits is not None:
            reduced = _rounded_seconds(config, plan, machine, numbers)
        gathered = weight_bytes(config) * once
        if plan.sharding.weights:  # gathered for each pass of each micro-batch, and reduced behind each
            count = plan.grad_accum_steps / machine.halves
            reduced, gathered = count * reduced, count * (gathered + _gathered_again(config, plan, machine, gathered))
            behind = 1.5 * backward * plan.grad_accum_steps
            waits = 3 * plan.grad_accum_steps * max(len(plan.blocks_of(stage)) for stage in range(plan.pp)) * hops
        else:
            behind = backward
            waits = 2 * ceil(numbers / BUCKET_NUMBERS) * hops
        sent = reduced + gathered + waits
        found["dp"] = (
            max(sent - behind, sent * VISIBLE) if practice.hides_reductions and machine.hides_messages else sent
        )
    pieces = replicas if plan.sharding.optimizer else 1
    moved = 2.0 * (states + FP32_BYTES * updated) + (FP32_BYTES + a) * updated
    found["optimizer"] = moved / pieces / (machine.memory_bandwidth * machine.constants.passes)
    return found


def _rounded_seconds(config: Config, plan: RunPlan, machine: Machine, numbers: int) -> float:
    """Of rounded gradients: by messages to each rank, for which a rank has its own adapter alone, and not all of its
    node's as a ring has; or within a node, and what is left of them between nodes."""
    links, once = machine.constants.links, gradient_bytes(config) * numbers
    own = min(machine.link, machine.network) if _leaves_node(plan, machine, plan.num_replicas) else machine.link
    within, replicas = config.parallel.reduce_within, plan.num_replicas
    if within is None:
        return (replicas - 1) / replicas * once / (own * links)
    near = own if _leaves_node(plan, machine, within) else machine.link
    return ((within - 1) / within * once / near + (replicas // within - 1) / replicas * once / own) / links


def _leaves_node(plan: RunPlan, machine: Machine, num_replicas: int) -> bool:
    """Whether so many neighbouring replicas are in more nodes than one."""
    return plan.tp * num_replicas > machine.ranks_per_node


def _gathered_again(config: Config, plan: RunPlan, machine: Machine, gathered: float) -> float:
    """Seconds of a backward pass's gather of all weights: from all replicas, or from the neighbours that kept them."""
    hpz = config.parallel.hpz_size
    if hpz is None:
        return gathered
    rate = _rate_over(plan, machine, "dp")
    if not _leaves_node(plan, machine, hpz):
        rate = machine.link * machine.constants.links
    numbers = max(parameters_by_stage(plan))
    return (hpz - 1) / hpz * numbers * ELEMENT_BYTES[config.precision.dtype] / rate


HOP_SECONDS = 5e-6
"""Of a message's way to the next rank, however short it is: what makes rings of thousands of ranks slow."""
BUCKET_NUMBERS = 40e6
"""Gradients that are sent together."""
VISIBLE = 0.1
"""Of messages behind a pass, the share that shows all the same: the last bucket, the first weights, and what they take
of the device."""


def _rate_over(plan: RunPlan, machine: Machine, axis: str) -> float:
    """Bytes a second that a rank sends to the others of an axis: as within a node where all of them are in one. Ranks
    of tp are neighbours, then come cp, dp and pp.

    A sum or a gather over several nodes goes round in as many rings as the axis has ranks in a node, each with an
    adapter of its own, so that every byte crosses with them all; messages to one other rank have the rank's own.
    """
    stage = plan.tp * plan.num_replicas
    inner = {"tp": plan.tp, "cp": plan.tp * plan.cp, "ep": plan.tp * max(plan.cp, plan.ep), "dp": stage}
    reach = inner.get(axis, plan.world_size)
    bandwidth = machine.link
    if reach > machine.ranks_per_node:
        sizes = {"cp": plan.cp, "dp": plan.num_replicas}
        rings = max(1, min(sizes.get(axis, 1), machine.ranks_per_node // plan.tp))
        bandwidth = min(machine.link, rings * machine.network)
    return bandwidth * machine.constants.links


def _tokens(config: Config, plan: RunPlan) -> int:
    """Of a micro-batch, on one rank."""
    return stream_tokens(config) // plan.cp


def _stream_bytes(config: Config, plan: RunPlan) -> float:
    """Of what one stage hands to the next; ranks of tp send a part each."""
    return ELEMENT_BYTES[config.precision.dtype] * _tokens(config, plan) * plan.model.hidden_size / plan.tp


def _sum(parts: Iterable[Parts]) -> Parts:
    total = Parts()
    for each in parts:
        for name, seconds in each.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _times(parts: Parts, factor: float) -> Parts:
    return {name: factor * seconds for name, seconds in parts.items()}
