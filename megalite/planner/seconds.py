"""Seconds of a step on a machine, before anything runs, and what they go into.

    products     matrix products of the blocks and of the head       FLOPs / (peak x products)
    attention    queries with keys, weights with values              FLOPs / (peak x products x attention)
    passes       norms, activations, what is added, the loss         bytes / (bandwidth x passes)
    tp, cp, ep   what ranks of a micro-batch send                    bytes / (link x links): nothing hides them
    offload      inputs of blocks to the host's memory and back      bytes / (host link x links), behind its work
    host         what the device's own work does not hide            overhead
    pp, bubble   messages between stages, and waiting for them       from the schedule itself (`schedules.simulation`)
    dp           gradients and weights over the replicas             what the passes do not hide (`replica_seconds`)
    optimizer    masters and moments, read and written               bytes / (bandwidth x passes), or `offloaded`

FLOPs and bytes are those of the one table of costs (`architecture.costs`, `planner.traffic`). The four constants are
the machine's. Sources: Narayanan et al. 2021 (Megatron-LM, sections 3 and 5), Korthikanti et al. 2022, Rajbhandari et
al. 2020 (ZeRO).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from megalite.architecture.architecture import BlockSpec, FeedForwardSpec
from megalite.architecture.attention_costs import context_sent_bytes, mixing_multiply_adds
from megalite.architecture.costs import (
    ELEMENT_BYTES,
    BlockCut,
    block_activation_bytes,
    block_sent_bytes,
    dispatch_sent_bytes,
    embedding_sent_bytes,
    head_sent_bytes,
    linear_multiply_adds,
    linear_numbers,
    linear_weights,
)
from megalite.architecture.trained import everything
from megalite.architecture.weights import vocab_rows_per_rank
from megalite.config.engine import choose_engine
from megalite.config.pipeline import few_rounds, pipeline_schedule
from megalite.config.plan import LOSS_CHUNK_TOKENS, RunPlan
from megalite.config.recompute import recompute_by_block
from megalite.config.schema import Config
from megalite.config.stream import stream_tokens
from megalite.config.trained import trained_parts
from megalite.parallel.schedules.simulation import ChunkCosts, Timeline, end_of, simulate
from megalite.planner.block_memory import is_compiled, kinds_of, stream_bytes
from megalite.planner.links import rate_over
from megalite.planner.machines import Machine
from megalite.planner.practice import OURS, Practice
from megalite.planner.replica_seconds import between_steps

Parts = dict[str, float]
"""Seconds, by what they go into."""

ATTENTION_BACKWARD = 2.5
"""Products of attention's backward pass over its forward pass's; the scores are made again."""
PASSES_FORWARD, PASSES_BACKWARD = 2.0, 3.0
"""What a pass reads and writes over what is kept: once each, and twice read and once written."""
WRITTEN_FORWARD, WRITTEN_BACKWARD = 6.0, 9.0
"""Scores read or written where attention writes them, mask and softmax in one kernel. Forward: the first product (1),
the softmax (2), dropout (2), the second product (1). Backward: the second product reads and writes (2), dropout (2),
the softmax (3), the first product, for queries and keys (2)."""


@dataclass(frozen=True)
class StepTime:
    """What a step is said to take."""

    seconds: float
    parts: Parts
    """Of the stage that works longest; with the bubble they add up to the whole."""


def step_time(config: Config, plan: RunPlan, machine: Machine, practice: Practice = OURS) -> StepTime:
    """Time of a step of the full batch."""
    found = step_time_below(inf, config, plan, machine, practice)
    assert found is not None, "of no step is it infinite"
    return found


def step_time_below(
    limit: float, config: Config, plan: RunPlan, machine: Machine, practice: Practice = OURS
) -> StepTime | None:
    """The same, but None as soon as it is known to be so many seconds or more."""
    count, chunks = plan.grad_accum_steps, _chunks(config, plan, machine, practice)
    work = [_sum(chunks[chunk].whole for chunk in plan.chunks_of(stage)) for stage in range(plan.pp)]
    longest = max(range(plan.pp), key=lambda stage: sum(work[stage].values()))
    parts = _times(work[longest], count)
    parts |= between_steps(config, plan, machine, practice, backward=sum(work[longest].values()) * 2 / 3)
    if sum(parts.values()) >= limit:
        return None
    if plan.pp > 1:
        busy, message = count * sum(work[longest].values()), _message_bytes(config, plan, practice)
        message /= rate_over(plan, machine, "pp")
        end = _end_with_messages(config, plan, chunks, machine, practice, message)
        if not machine.hides_messages:
            end = max(end, busy + count * plan.cuts_of(longest) * message)
        if sum(parts.values()) + end - busy >= limit:
            return None
        parts["bubble"] = max(0.0, min(_end_of_pipeline(config, plan, chunks), end) - busy)
        parts["pp"] = max(0.0, end - busy - parts["bubble"])
    return StepTime(sum(parts.values()), parts)


def _end_with_messages(
    config: Config, plan: RunPlan, chunks: list[_Chunk], machine: Machine, practice: Practice, message: float
) -> float:
    if not practice.waits_for_stages:
        return _end_of_pipeline(config, plan, chunks, link=message)
    return _end_of_pipeline(config, plan, chunks, beside=message + _gather_seconds(config, plan, machine))


def micro_batch_seconds(config: Config, plan: RunPlan, machine: Machine, practice: Practice = OURS) -> float:
    """Of one micro-batch through the whole model, both ways."""
    return sum(seconds for chunk in _chunks(config, plan, machine, practice) for seconds in chunk.whole.values())


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

    def times(self, count: int) -> _Chunk:
        """So many alike, one behind the other."""
        return _Chunk(_times(self.forward, count), _times(self.backward, count), count * self.weights)


def _chunks(config: Config, plan: RunPlan, machine: Machine, practice: Practice) -> list[_Chunk]:
    """Every chunk of the pipeline; blocks that are alike are counted once."""
    model, found = plan.model, list[_Chunk]()
    kinds = kinds_of(plan, range(model.num_layers + model.num_predictions))
    trained = trained_parts(model, config.optimizer)
    if choose_engine(config) == "deepspeed" and model.lora is None:  # which makes gradients of frozen weights, too
        trained = everything(model)
    passes = [trained.shares[index] if trained.is_passed(index) else None for index in range(len(kinds))]
    of_each = list(zip(kinds, recompute_by_block(config, plan), passes, strict=True))
    known = {
        each: _block(config, plan, model.block_of(each[0]), machine, practice, recompute=each[1], trained=each[2])
        for each in set(of_each)
    }
    for number, (first, stop) in enumerate(plan.chunk_blocks):
        is_last = number == len(plan.chunk_blocks) - 1
        alike = Counter(of_each[first : None if is_last else stop])  # what predicts further is behind
        blocks = [known[each].times(count) for each, count in alike.items()]
        head = _head(config, plan, machine, practice, trains=trained.trains_head) if is_last else {}
        embedding = _embedding(config, plan, machine) if number == 0 else {}
        # Pairs of answers: the model's own forward pass once more, and the reference's
        times = 1 if config.train.preference is None else 3
        found.append(
            _Chunk(
                _sum([embedding, *(each.forward for each in blocks), head] * times),
                _sum(each.backward for each in blocks),
                sum(each.weights for each in blocks),
            )
        )
    return found


def _block(
    config: Config,
    plan: RunPlan,
    block: BlockSpec,
    machine: Machine,
    practice: Practice,
    *,
    recompute: str,
    trained: float | None,
) -> _Chunk:
    """One block's passes over a micro-batch of a rank.

    Args:
        trained: of its matrices, the share of which gradients are made; None where no gradient comes.
    """
    hidden, a = plan.model.hidden_size, ELEMENT_BYTES[config.precision.dtype]
    tokens, rate = _tokens(config, plan), machine.product_rate(config.precision)
    linear = 2.0 * tokens * linear_multiply_adds(block, hidden) / plan.tp / _rate_of_linear(config, machine)
    numbers = tokens * linear_numbers(block, hidden, plan.tp) + linear_weights(block, hidden, plan.ep) / plan.tp
    linear += a * numbers / machine.memory_bandwidth
    spans = 2.0 * tokens * mixing_multiply_adds(block.attention, config.batch.seq_len) / plan.tp
    attention = (1.0 if practice.skips_hidden else 2.0) * spans / (rate * machine.attention)
    cut = BlockCut(plan.tp, config.parallel.sequence_parallel)
    kept = tokens * block_activation_bytes(block, hidden, element_bytes=a, cut=cut)
    bandwidth = machine.memory_bandwidth * machine.constants.passes
    scores = 0.0
    if not practice.fused_attention:
        scores = WRITTEN_FORWARD * a * tokens * config.batch.seq_len * block.attention.num_heads / plan.tp / bandwidth
    passes = PASSES_FORWARD * kept / bandwidth
    casts = practice.cast_bytes * numbers / bandwidth if config.precision.fp8 is not None else 0.0
    visible = practice.visible_messages / 2
    sent = {axis: seconds * visible for axis, seconds in _sent(config, plan, block, machine).items()}
    forward = {"products": linear, "attention": attention, "passes": passes + scores + casts / 2, **sent}
    copy = 0.0 if trained is None else _copy_seconds(config, plan, machine)
    forward["offload"] = max(0.0, copy - sum(forward.values()))
    forward["host"] = _host(config, machine, forward)
    if trained is None:
        return _Chunk(forward, {}, 0.0)
    backward = {
        "products": (1 + trained) * linear,
        "attention": ATTENTION_BACKWARD * attention,
        "passes": PASSES_BACKWARD / PASSES_FORWARD * passes + WRITTEN_BACKWARD / WRITTEN_FORWARD * scores + casts,
        **sent,
    }
    backward["host"] = _host(config, machine, backward, passes=2)
    if recompute == "full":  # what is made again is not copied out again
        backward = _sum((backward, {**forward, "offload": 0.0}))
    elif recompute == "selective" and is_compiled(config, plan):
        pass  # what is made again is fused into what needs it
    elif recompute == "selective" and practice.redoes_attention:
        backward = _sum((backward, {"attention": attention, "passes": scores}))
    elif recompute == "selective":
        backward = _sum((backward, {"passes": passes}))
    backward["offload"] = max(0.0, copy - sum(backward.values()))
    return _Chunk(forward, backward, trained * linear)


def _copy_seconds(config: Config, plan: RunPlan, machine: Machine) -> float:
    """Of a block's input to the host's memory, or back, where it waits there for the backward pass."""
    if not config.train.offload_activations or machine.host_link is None:
        return 0.0
    return stream_bytes(config, plan) / (machine.host_link * machine.constants.links)


def _host(config: Config, machine: Machine, device: Parts, passes: int = 1) -> float:
    """Seconds of the host that a device which is given work ahead has to wait for; a CPU is host and device in one, and
    one that repeats a micro-batch from its record waits for nobody."""
    if config.train.cuda_graphs:
        return 0.0
    overhead = passes * machine.constants.overhead
    return max(0.0, overhead - sum(device.values())) if machine.hides_messages else overhead


def _rate_of_linear(config: Config, machine: Machine) -> float:
    if config.precision.is_emulated:
        return machine.rate("fp32")
    return machine.product_rate(config.precision) if config.precision.fp8 is None else machine.rate("fp8")


def _sent(config: Config, plan: RunPlan, block: BlockSpec, machine: Machine) -> Parts:
    """Seconds of a block's messages to the ranks that have parts of the same micro-batch, there and back. Each waits to
    begin as a block does, or until all have come."""
    a, tokens, parallel = ELEMENT_BYTES[config.precision.dtype], _tokens(config, plan), config.parallel
    hidden, found, waits = plan.model.hidden_size, Parts(), machine.meeting or machine.constants.overhead
    if plan.tp > 1:
        sent = block_sent_bytes(
            block, hidden, element_bytes=a, tp=plan.tp, sequence_parallel=parallel.sequence_parallel
        )
        share = machine.halves if parallel.sequence_parallel else 1.0
        messages = 8 if parallel.sequence_parallel or machine.meeting is not None else 4
        found["tp"] = tokens * sent / rate_over(plan, machine, "tp") / share + messages * waits
    if plan.cp > 1:
        sent = context_sent_bytes(block, kind=parallel.cp_kind, element_bytes=a, cp=plan.cp, tp=plan.tp)
        messages = 3 if parallel.cp_kind == "allgather" else 2 * plan.cp
        found["cp"] = tokens * sent / rate_over(plan, machine, "cp") + messages * waits
    if plan.ep > 1 and not isinstance(block.feed_forward, FeedForwardSpec):
        sent = dispatch_sent_bytes(block.feed_forward, hidden, element_bytes=a, ep=plan.ep)
        found["ep"] = tokens * sent / rate_over(plan, machine, "ep") + EP_MESSAGES * waits
    return found


EP_MESSAGES = 5
"""How many rows come, rows and results there and back, and their gradients likewise."""


def _head(config: Config, plan: RunPlan, machine: Machine, practice: Practice, *, trains: bool) -> Parts:
    """The head with its loss, whose gradients are made in the forward pass; once more for each further prediction."""
    rows = vocab_rows_per_rank(plan.model.vocab_size, plan.tp)
    logits = _tokens(config, plan) * rows * (1 + plan.model.num_predictions)
    operations = (6.0 if trains else 4.0) * logits * plan.model.hidden_size
    found = {
        "products": operations / machine.product_rate(config.precision),
        "passes": practice.logit_bytes * logits / (machine.memory_bandwidth * machine.constants.passes),
    }
    if plan.tp > 1:
        chunk = LOSS_CHUNK_TOKENS["cuda" if machine.hides_messages else "cpu"]
        a, num_sums = ELEMENT_BYTES[config.precision.dtype], 1 + 2 * ceil(_tokens(config, plan) / chunk)
        sent = head_sent_bytes(plan.model.hidden_size, element_bytes=a, tp=plan.tp)
        found["tp"] = (1 + plan.model.num_predictions) * _sums(config, plan, machine, sent, num_sums)
    return found


def _embedding(config: Config, plan: RunPlan, machine: Machine) -> Parts:
    """Rows that each rank of tp has found, added up; once more for each further prediction."""
    if plan.tp == 1:
        return {}
    a = ELEMENT_BYTES[config.precision.dtype]
    sent = embedding_sent_bytes(plan.model.hidden_size, element_bytes=a, tp=plan.tp)
    return {"tp": (1 + plan.model.num_predictions) * _sums(config, plan, machine, sent, 1)}


def _sums(config: Config, plan: RunPlan, machine: Machine, sent: float, count: int) -> float:
    """Seconds of some sums over tp outside of blocks, given the bytes of each token that a rank sends for all."""
    waits = machine.constants.overhead if machine.meeting is None else 2 * machine.meeting
    return _tokens(config, plan) * sent / rate_over(plan, machine, "tp") + count * waits


def step_timeline(config: Config, plan: RunPlan, machine: Machine) -> Timeline:
    """When each stage does what in a step, in seconds; without what stands between steps."""
    costs = _costs(_chunks(config, plan, machine, OURS))
    message = _message_bytes(config, plan, OURS) / rate_over(plan, machine, "pp")
    return simulate(pipeline_schedule(config, plan, plan.grad_accum_steps), costs, link=message)


def _costs(chunks: list[_Chunk], beside: float = 0.0) -> tuple[ChunkCosts, ...]:
    return tuple(
        ChunkCosts(
            forward=sum(each.forward.values()) + beside,
            input_gradient=sum(each.backward.values()) - each.weights + beside,
            weight_gradient=each.weights,
        )
        for each in chunks
    )


def _end_of_pipeline(
    config: Config, plan: RunPlan, chunks: list[_Chunk], *, link: float = 0.0, beside: float = 0.0
) -> float:
    """When the last pass of a step ends. Beyond some rounds a schedule repeats itself, so only these are simulated, and
    one more, which tells what the others take.

    Args:
        link: seconds that a message is under way, behind which a stage may work.
        beside: seconds that a stage stands still for messages after each pass.
    """
    count, costs = plan.grad_accum_steps, _costs(chunks, beside)
    few = count if plan.own_schedule is not None else few_rounds(count, plan.pp)
    end = end_of(pipeline_schedule(config, plan, few), costs, link=link)
    if few == count:
        return end
    of_round = end_of(pipeline_schedule(config, plan, few + plan.pp), costs, link=link) - end
    return end + (count - few) / plan.pp * of_round


def _gather_seconds(config: Config, plan: RunPlan, machine: Machine) -> float:
    """Of a stream that has come in parts, one to each rank of tp."""
    if plan.tp == 1 or config.parallel.sequence_parallel:
        return 0.0
    others = (plan.tp - 1) / plan.tp * stream_bytes(config, plan)
    return others / rate_over(plan, machine, "tp") + machine.constants.overhead


def _tokens(config: Config, plan: RunPlan) -> int:
    """Of a micro-batch, on one rank."""
    return stream_tokens(config) // plan.cp


def _message_bytes(config: Config, plan: RunPlan, practice: Practice) -> float:
    """Of what a rank of one stage hands to the next: the stream as it holds it. Where stages stand still for messages,
    ranks of tp that hold the whole stream send a part each."""
    is_cut = practice.waits_for_stages and not config.parallel.sequence_parallel
    return stream_bytes(config, plan) / (plan.tp if is_cut else 1)


def _sum(parts: Iterable[Parts]) -> Parts:
    total = Parts()
    for each in parts:
        for name, seconds in each.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _times(parts: Parts, factor: float) -> Parts:
    return {name: factor * seconds for name, seconds in parts.items()}
