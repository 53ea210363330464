"""The run plan: every number that follows from the config and the world size, computed once.

Nothing here chooses; nothing elsewhere recomputes. The plan of a run is saved as `plan.json`, so that a person can see
what `dp: null` or `tokens: 1e9` became. Pure arithmetic, no torch: a laptop plans 70B on 512 ranks in milliseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megalite.architecture.architecture import Architecture, BlockKind, BlockSpec
from megalite.architecture.costs import (
    count_parameters,
    flops_per_token,
    multiply_adds_by_block,
    prediction_multiply_adds,
)
from megalite.architecture.settings import MOST_LAYERS
from megalite.architecture.weights import vocab_rows_per_rank
from megalite.config.batch_sizes import BatchSizes, batch_sizes, tokens_before
from megalite.config.engine import choose_engine
from megalite.config.fill import fill
from megalite.config.length import derive_steps, fill_schedule
from megalite.config.schema import Config, ParallelConfig, ScheduleConfig
from megalite.config.trained import trained_parts
from megalite.parallel.schedules.files import write_schedule
from megalite.parallel.schedules.kinds import SCHEDULES, find_placement, is_file, read_own
from megalite.parallel.schedules.operations import ChunkPlacement, PipelineSchedule, ScheduleError

HEAD_TIME_PER_FLOP = 0.75
"""Time of the head's FLOPs over that of a block's: the head is one large product, a block is many small ones with norms
and attention between. Measured on a CPU: 0.74 to 0.83 at a width of 384, 1.0 at 1024."""

LOSS_CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}
"""Tokens whose logits exist at once in the loss. Each chunk passes once over the fp32 gradient of the head: 8 bytes a
weight against 6 x tokens FLOPs, so a tenth of the products' time at most where a byte costs 15 FLOPs (a CPU's core) or
170 (an H200)."""

CACHED_LOGITS = 2**20
"""What a CPU's cores keep at hand between two passes over the same logits: 4 MB of fp32."""

PRODUCT_PIECE = 2**21
"""Numbers of a product in few bits that a CPU makes before it adds them to their sums in fp32: they and their copies in
fp32 are still in its caches then. A head of 32,000 x 768 takes 0.8 of the time so on a Xeon with AMX, one of 2048
columns 0.4; a Zen 4 takes as long as with one piece, in less memory."""

SPLITS_KEPT = 256
"""Cuts of blocks that are remembered: a search asks for the same again and again."""

SPLIT_HALVINGS = 60
"""Of the span in which the fastest cut is looked for: to the last bit of a float."""

COMPILE_PAYS_FROM_FLOPS_CPU = 1.2e14
"""Training FLOPs a rank from which compilation repays itself on a CPU: it costs 15-40 s and saves about a tenth of
the step, at some 1e11 FLOP/s a core."""

COMPILE_PAYS_FROM_STEPS_CUDA = 200
"""Steps from which compilation repays itself on a GPU."""


@dataclass(frozen=True)
class Sharding:
    """What the data-parallel ranks of a run divide among them; each holds the rest whole."""

    optimizer: bool
    """Master weights and the optimizer's state."""
    gradients: bool
    weights: bool
    """Those that compute."""

    @property
    def zero_stage(self) -> int:
        """What ZeRO calls it (Rajbhandari et al. 2020, section 5)."""
        return self.optimizer + self.gradients + self.weights


@dataclass(frozen=True)
class RunPlan:
    """All derived numbers of a run. Sizes are counts; `per_rank` is of the fullest rank."""

    world_size: int
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    """Of the dp x cp replicas, how many divide the experts."""
    model: Architecture
    """The model with every null filled in."""
    padded_vocab_size: int
    grad_accum_steps: int
    """Micro-batches a rank runs in one step, once the batch has its full size."""
    tokens_per_step: int
    """Of a step of the full batch size."""
    total_steps: int
    first_step: int
    last_step: int
    """Of the stage that this is the plan of, from its first on; of the run, where its sequences have one length."""
    total_tokens: int
    """Tokens of all steps."""
    batch_sizes: BatchSizes
    """Sequences of each step, and which."""
    full_batch_size: int
    """batch.global_batch_size of the run's config, which the learning rate is for."""
    schedule: ScheduleConfig
    """The schedule with its warmup and its phases in steps."""
    group_schedules: dict[int, ScheduleConfig]
    """The same of `optimizer.groups` that have one of their own, by their number."""
    chunk_blocks: tuple[tuple[int, int], ...]
    """For each chunk of the pipeline, from the first layers to the last, the half-open range of blocks it holds."""
    chunk_ranks: tuple[int, ...]
    """For each chunk the stage that holds it."""
    own_schedule: PipelineSchedule | None
    """Where the pipeline's schedule is a file of one's own: what was read in it."""
    num_parameters: int
    """True parameters of the whole model, vocabulary padding left out, tied weights once."""
    flops_per_token: float
    """Floating-point operations of one token's forward and backward pass, causal attention counted half."""

    sharding: Sharding
    """What data-parallel ranks divide among them."""

    def goes_on_from(self, step: int) -> bool:
        """Whether the step behind one is of this stage."""
        return self.first_step <= step + 1 <= self.last_step

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that a pipeline stage holds, in the model's order."""
        return self._chunks_by_stage[stage]

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """The blocks that a pipeline stage holds, in the model's order."""
        return self._blocks_by_stage[stage]

    @cached_property
    def _chunks_by_stage(self) -> tuple[tuple[int, ...], ...]:
        found = [list[int]() for _ in range(self.pp)]
        for chunk, stage in enumerate(self.chunk_ranks):
            found[stage].append(chunk)
        return tuple(map(tuple, found))

    @cached_property
    def _blocks_by_stage(self) -> tuple[tuple[int, ...], ...]:
        ranges = [range(*bounds) for bounds in self.chunk_blocks]
        return tuple(tuple(index for chunk in mine for index in ranges[chunk]) for mine in self._chunks_by_stage)

    @cached_property
    def block_kinds(self) -> list[BlockKind]:
        """The kind of each block of the model, first to last."""
        return self.model.kinds()

    @cached_property
    def block_specs(self) -> dict[BlockKind, BlockSpec]:
        """Of each kind, how its blocks are."""
        return {kind: self.model.block_of(kind) for kind in dict.fromkeys(self.block_kinds)}

    def cuts_of(self, stage: int) -> int:
        """Borders of a stage's chunks with chunks of other stages: over each goes a stream, and its gradient back."""
        return sum(a != b and stage in (a, b) for a, b in itertools.pairwise(self.chunk_ranks))

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same part of the model and see other tokens: what ZeRO divides over."""
        return self.dp * self.cp

    @property
    def layout(self) -> dict[str, int]:
        """How the run is cut, as its checkpoints record it."""
        experts = {"ep": self.ep} if self.ep > 1 else {}
        return {
            "pp": self.pp,
            "dp": self.dp,
            "cp": self.cp,
            "tp": self.tp,
            **experts,
            "zero_stage": self.sharding.zero_stage,
        }

    def to_dict(self) -> dict:
        """A JSON-ready form, as written to plan.json."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["sharding"] = dataclasses.asdict(self.sharding)
        plain["model"] = self.model.model_dump(mode="json")
        plain["schedule"] = self.schedule.model_dump(mode="json")
        schedules = self.group_schedules.items()
        plain["group_schedules"] = {str(number): each.model_dump(mode="json") for number, each in schedules}
        plain["batch_sizes"] = [dataclasses.asdict(span) for span in self.batch_sizes.spans]
        plain["own_schedule"] = write_schedule(self.own_schedule).splitlines() if self.own_schedule else None
        plain["chunk_blocks"] = [list(bounds) for bounds in self.chunk_blocks]
        return plain


def make_plan(config: Config, world_size: int, tokenizer_vocab_size: int | None = None) -> RunPlan:
    """Derive the plan of a validated config.

    Args:
        config: a config that `validate` passed for this world size.
        world_size: number of ranks.
        tokenizer_vocab_size: vocabulary of the data's tokenizer; used where model.vocab_size is null.

    Raises:
        ConfigError: the vocabulary size is given neither by the config nor by a tokenizer.
        ScheduleError: the schedule's file cannot be read any more.
    """
    model = fill(config, tokenizer_vocab_size)
    parallel, batch = config.parallel, config.batch
    dp = derive_dp(config, world_size)
    sizes, total_steps = batch_sizes(batch), derive_steps(config)
    own_schedule = read_own(parallel.schedule) if parallel.pp > 1 else None
    placement = place_chunks(parallel, own_schedule)
    return RunPlan(
        world_size=world_size,
        pp=parallel.pp,
        dp=dp,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
        model=model,
        padded_vocab_size=vocab_rows_per_rank(model.vocab_size, parallel.tp) * parallel.tp,
        grad_accum_steps=batch.global_batch_size // (batch.micro_batch_size * dp),
        tokens_per_step=batch.global_batch_size * batch.seq_len,
        total_steps=total_steps,
        first_step=1,
        last_step=total_steps,
        total_tokens=tokens_before(batch, total_steps + 1),
        batch_sizes=sizes,
        full_batch_size=batch.global_batch_size,
        schedule=fill_schedule(config),
        group_schedules={
            number: fill_schedule(config, group.schedule)
            for number, group in enumerate(config.optimizer.groups)
            if group.schedule is not None
        },
        chunk_blocks=chunk_blocks(parallel, model, batch.seq_len, placement),
        chunk_ranks=placement.ranks,
        own_schedule=own_schedule,
        num_parameters=count_parameters(model),
        flops_per_token=flops_per_token(model, batch.seq_len, trained_parts(model, config.optimizer)),
        sharding=Sharding(*(parallel.zero_stage >= stage for stage in (1, 2, 3))),
    )


def derive_dp(config: Config, world_size: int) -> int:
    """Data-parallel size: the configured one, or what the world size leaves."""
    parallel = config.parallel
    return parallel.dp or max(1, world_size // (parallel.pp * parallel.cp * parallel.tp))


def needs_embedding_at_head(model: Architecture) -> bool:
    """Whether the stage of the head has the embedding too: as the head, or for predictions further ahead."""
    return model.tie_embeddings or model.mtp is not None


def has_embedding_copy(plan: RunPlan) -> bool:
    """Whether two pipeline stages hold the embedding: the first, and the one with the head."""
    return needs_embedding_at_head(plan.model) and plan.chunk_ranks[0] != plan.chunk_ranks[-1]


def has_copies(parallel: ParallelConfig, dp: int, *, has_embedding_copy: bool) -> bool:
    """Whether any weight is held by two ranks of a layout."""
    is_copied = parallel.zero_stage < 3 or parallel.dp_replicate > 1
    return parallel.tp > 1 or (dp * parallel.cp > 1 and is_copied) or has_embedding_copy


def ends_apart(parallel: ParallelConfig) -> bool:
    """Whether embedding and head are on two stages; not with an unknown schedule or too many chunks: said elsewhere."""
    if parallel.pp == 1 or not (is_file(parallel.schedule) or parallel.schedule in SCHEDULES):
        return False
    if parallel.pp * (parallel.chunks or 1) > MOST_LAYERS:
        return False
    try:
        ranks = place_chunks(parallel, read_own(parallel.schedule)).ranks
    except ScheduleError:
        return False
    return ranks[0] != ranks[-1]


def default_world_size(config: Config) -> int:
    """Ranks that `megalite train` starts by itself: pp x dp x cp x tp with an underived dp of 1."""
    parallel = config.parallel
    return parallel.pp * (parallel.dp or 1) * parallel.cp * parallel.tp


def place_chunks(parallel: ParallelConfig, own: PipelineSchedule | None) -> ChunkPlacement:
    """Which stage holds which chunk, by a schedule of one's own or of ours."""
    return own.placement if own is not None else find_placement(parallel.schedule, parallel.pp, parallel.chunks)


def chunk_blocks(
    parallel: ParallelConfig, model: Architecture, seq_len: int, placement: ChunkPlacement
) -> tuple[tuple[int, int], ...]:
    """The range of blocks of each chunk: as configured, or so that the slowest chunk is as fast as can be.

    Args:
        model: a filled model.
    """
    counts: Sequence[int] | None = parallel.blocks_per_chunk or parallel.blocks_per_stage
    if counts is None:
        head = (1 + model.num_predictions) * HEAD_TIME_PER_FLOP * model.vocab_size * model.hidden_size
        head += model.num_predictions * prediction_multiply_adds(model, seq_len)
        costs = multiply_adds_by_block(model, seq_len)
        ranks = placement.ranks
        if head * len(ranks) <= sum(costs) + head or len(ranks) == parallel.pp:
            return split_blocks(costs, len(ranks), head)
        counts = fill_stages(ranks, len(costs), head * len(costs) / sum(costs))
    stops = list(itertools.accumulate(counts))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def fill_stages(ranks: Sequence[int], num_layers: int, head_cost: float) -> list[int]:
    """Blocks of each chunk where the head alone outweighs an even chunk: stages are made even, as far as can be.

    Args:
        ranks: the stage of each chunk.
        num_layers: blocks, of about the same cost; at least as many as there are chunks but the last.
        head_cost: of the head, in blocks.
    """
    counts = [1] * (len(ranks) - 1) + [0]
    loads = [float(ranks[:-1].count(rank)) for rank in range(max(ranks) + 1)]
    loads[ranks[-1]] += head_cost
    for _ in range(num_layers - len(ranks) + 1):
        own = [*counts[:-1], head_cost + counts[-1]]
        chunk = min(range(len(ranks)), key=lambda chunk: (loads[ranks[chunk]], own[chunk]))
        counts[chunk] += 1
        loads[ranks[chunk]] += 1.0
    return counts


@lru_cache(maxsize=SPLITS_KEPT)
def split_blocks(costs: tuple[float, ...], pp: int, head_cost: float) -> tuple[tuple[int, int], ...]:
    """Cut the blocks into pp runs such that the slowest stage is as fast as can be.

    The last stage has the head and its loss too, which in a small model with a large vocabulary outweigh several
    blocks: it takes fewer blocks for it, even none.

    Args:
        costs: time of each block, at least pp of them.
        pp: pipeline stages.
        head_cost: time of the head.
    """
    others = pp - 1
    if others == 0:
        return ((0, len(costs)),)
    if len(set(costs)) == 1:
        return _split_equal(len(costs), others, head_cost / costs[0])
    low, high = max(costs), sum(costs) + head_cost
    for _ in range(SPLIT_HALVINGS):
        limit = (low + high) / 2
        low, high = (low, limit) if _split_within(costs, others, head_cost, limit) else (limit, high)
    found = _split_within(costs, others, head_cost, high)
    assert found is not None
    return found


def _split_equal(num_layers: int, others: int, head_cost: float) -> tuple[tuple[int, int], ...]:
    """The same for blocks that cost 1 each: the first stages are even, what is over going to the first of them."""

    def slowest(in_last: int) -> float:
        return max(-(-(num_layers - in_last) // others), in_last + head_cost)

    in_last = min(range(num_layers - others, -1, -1), key=slowest)  # of equals the fullest: it relieves the others
    each, extra = divmod(num_layers - in_last, others)
    stops = [each * (stage + 1) + min(stage + 1, extra) for stage in range(others)]
    return tuple(zip([0, *stops], [*stops, num_layers], strict=True))


def _split_within(
    costs: Sequence[float], others: int, head_cost: float, limit: float
) -> tuple[tuple[int, int], ...] | None:
    """Runs none of which takes longer than a limit: each of the first as full as it may be, with a block left for every
    other one; None where there are no such."""
    stops, place = [], 0
    for stage in range(others):
        used, left_for_others = 0.0, others - stage - 1
        while place < len(costs) - left_for_others and used + costs[place] <= limit:
            used += costs[place]
            place += 1
        stops.append(place)
    runs = tuple(zip([0, *stops], [*stops, len(costs)], strict=True))
    fits = sum(costs[place:]) + head_cost <= limit and all(start < stop for start, stop in runs[:-1])
    return runs if fits else None


def compile_pays(config: Config, plan: RunPlan, device: str) -> bool:
    """Whether torch.compile is on: the user's word, or under `auto` whether the run is long enough to repay it."""
    if config.train.compile != "auto":
        return config.train.compile == "on"
    if config.precision.fp4 is not None:
        return False  # emulation ends the graph at each product
    if config.parallel.zero_stage == 3 and choose_engine(config) == "deepspeed":
        return False  # the compiler would trace DeepSpeed's gathering hooks, and give up on each
    if device == "cuda":
        return plan.total_steps >= COMPILE_PAYS_FROM_STEPS_CUDA
    flops_per_rank = plan.flops_per_token * plan.total_tokens / plan.world_size
    return flops_per_rank >= COMPILE_PAYS_FROM_FLOPS_CPU
