"""The machine at hand as a file for the planner: rates and constants measured with a config's own model.

    peak            the fastest of a few large square products, by format, or of the config's own
    bandwidth       a copy; of GPUs also one to the host's memory and back, and one in it
    link            an all-reduce of a large stream over the ranks of this node, behind a product that makes it
    meeting         on CPUs, what a block that all ranks share takes longer than everything else says, a message
    products        products at the shapes of the config's blocks, over the peak, without what reading and writing takes
    attention       its kernels at the config's heads, of documents as long as its and longer ones, over the products
    overhead        a block's passes over hardly any tokens, without their products
    passes          what is left of a block's passes over a micro-batch

Blocks, products and messages are timed by `studies.bench`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.attention_costs import mixing_multiply_adds
from megalite.architecture.costs import ELEMENT_BYTES, linear_multiply_adds, linear_numbers, linear_weights
from megalite.config.plan import compile_pays, make_plan
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.config.wording import or_
from megalite.errors import UserError
from megalite.host import num_cores, total_bytes
from megalite.parallel.axes import Axis
from megalite.parallel.messages import begin_gather, begin_scatter_sum
from megalite.planner.machines import Constants, Machine
from megalite.planner.seconds import ATTENTION_BACKWARD, micro_batch_seconds
from megalite.studies.bench import BLOCKS, DTYPES, NEARLY_NONE, Bench
from megalite.studies.peaks import peaks, worth_planning_with
from megalite.train.fork_server import RANK_MEMORY
from megalite.train.signals import hear, held

COPIED_BYTES = 2**28
LEAST_SENT_BYTES = 2**25
FEW_TOKENS = 16
BOUTS = 3


def calibrate(config: Config, device_type: str, *, num_ranks: int, vocab_size: int) -> dict[str, Any]:
    """What a machine's file says. All ranks are measured at once, since they share the machine's memory.

    Args:
        config: whose model and micro-batch are measured; its layout does not matter.
        device_type: cpu or cuda.
        num_ranks: of this node.

    Raises:
        UserError: the model has experts, the format is another one, or a rank failed.
    """
    alone = _on_one_rank(config)
    validate(alone, 1)
    model = make_plan(alone, 1, vocab_size).model
    if model.moe is not None:
        raise UserError("plan calibrate: give a config of a dense model; experts' constants are the same")
    if alone.precision.dtype not in DTYPES:
        raise UserError(f"plan calibrate: measures in {or_(DTYPES)}; give precision.dtype={or_(DTYPES)}")
    context = multiprocessing.get_context("spawn")
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="megalite-calibrate-") as folder:
        queue, store = context.Queue(), os.path.join(folder, "store")
        arguments = (num_ranks, device_type, store, alone, model, queue)
        ranks = [context.Process(target=_measure, args=(rank, *arguments), daemon=True) for rank in range(num_ranks)]
        try:
            with allocator_of_training(), held():
                for each in ranks:
                    each.start()
            found = _first_of(queue, ranks)
            for each in ranks:
                each.join(SECONDS_TO_END)
        finally:
            for each in ranks:
                if each.is_alive():  # it waits for others, or this process was interrupted
                    each.kill()
    cores = max(1, num_cores() // num_ranks)
    how = f"megalite plan calibrate, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {cores} cores a rank"
    sources = dict.fromkeys(found.keys() - {"hides_messages"}, how)
    unmeasured = {"network": "that of the link: not measured"}
    if num_ranks == 1:
        unmeasured |= {"link": "that of memory: not measured, one rank has nobody to send to"}
    return {**found, "sources": {**sources, **unmeasured}}


SECONDS_TO_END = 60.0


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end ranks and remove what is on the disk, as Ctrl-C does."""
    former = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


@contextmanager
def allocator_of_training() -> Iterator[None]:
    """What processes that are started now keep of freed memory is what ranks of a run do; else their passes would be
    slowed by the system, which hands out memory anew each time."""
    added = RANK_MEMORY.keys() - os.environ.keys()
    os.environ.update({name: RANK_MEMORY[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _first_of(queue: Any, ranks: Sequence[Any]) -> dict[str, Any]:
    """What the first rank has found.

    Raises:
        UserError: a rank has failed.
    """
    while True:
        try:
            return dict(queue.get(timeout=1.0))
        except Empty:
            if any(each.exitcode for each in ranks):
                raise UserError("plan calibrate: a rank failed, as it says above; use fewer --ranks") from None


def _on_one_rank(config: Config) -> Config:
    ones = ("tp", "pp", "cp", "ep", "dp", "dp_replicate", "zero_stage")
    none = ("engine", "blocks_per_stage", "blocks_per_chunk", "chunks", "hpz_size", "reduce_within")
    others = {"schedule": "1f1b", "sequence_parallel": False, "async_tp": False}
    whole: dict[str, Any] = {**dict.fromkeys(ones, 1), **dict.fromkeys(none), **others}
    parallel = config.parallel.model_copy(update=whole)
    batch = config.batch.model_copy(update={"global_batch_size": config.batch.micro_batch_size})
    train = config.train.model_copy(update={"recompute": "none", "recompute_layers": (), "offload_activations": False})
    plain: dict[str, Any] = {"fp8": None, "fp4": None, "qat": None, "master_dtype": "fp32", "products": "fp32"}
    precision = config.precision.model_copy(update=plain)
    changed = {"parallel": parallel, "batch": batch, "train": train, "precision": precision}
    return config.model_copy(update=changed)


def _measure(
    rank: int, num_ranks: int, device_type: str, store: str, config: Config, model: Architecture, queue: Any
) -> None:
    """One rank's measurements, beside those of the others. Ctrl-C is for the process that has started them, which ends
    them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hear()
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    torch.set_num_threads(max(1, num_cores() // num_ranks))  # a GPU's rank copies in the host's memory with them
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
    )
    is_compiled = compile_pays(config, make_plan(config, 1, model.vocab_size), device_type)
    bench, tokens = Bench(config, model, device, is_compiled), config.batch.micro_batch_size * config.batch.seq_len
    flops, name = peaks(device), config.precision.dtype
    dist.barrier()
    bandwidth = _copy_rate(bench)
    dist.barrier()
    of_products = _rate_of_products(bench, tokens, bandwidth)
    flops = worth_planning_with(flops | {name: max(flops[name], of_products)})
    dist.barrier()
    attention = _attention(bench, tokens, of_products)
    dist.barrier()
    overhead = _overhead(bench, of_products, bandwidth)
    dist.barrier()
    of_block, shared = _blocks_seconds(bench, tokens, num_ranks)
    link = _link_rate(bench, tokens, num_ranks)
    halves = _halves(bench, tokens, num_ranks, link)
    found: dict[str, Any] = {
        "ranks_per_node": num_ranks,
        "memory_gib": _memory_bytes(device, num_ranks) / 2**30,
        "flops": flops,
        "memory_bandwidth": bandwidth,
        "link": link,
        "network": link,
        "hides_messages": device_type != "cpu",
        "constants": {"products": of_products / flops[name], "passes": 1.0, "links": 1.0, "overhead": overhead},
    }
    if device_type == "cuda":
        found |= {"host_link": _host_link_rate(bench), "host_memory_gib": total_bytes() / 2**30}
        found["host_bandwidth"] = _copy_rate(bench, "cpu")
    found |= {name: each for name, each in (("halves", halves), ("attention", attention)) if each not in (1.0, None)}
    if rank == 0:
        found["constants"]["passes"] = _passes(bench, Machine(**found, sources={}), of_block)
        meeting = 0.0 if shared is None else _meeting(bench, Machine(**found, sources={}), shared, num_ranks)
        queue.put(found | ({"meeting": meeting} if meeting > overhead else {}))
    dist.barrier()
    dist.destroy_process_group()


LONGEST = {"cpu": 2048, "cuda": 32768}
"""Documents whose attention is timed: of a CPU's, longer ones take seconds."""
LONGER = 4
"""Times, of two lengths of documents."""
POSSIBLE = 0.05, 1.5
"""Rate of attention over that of products; another one is other work's, of which two times differ."""


def _attention(bench: Bench, tokens: int, rate: float) -> float | None:
    """Rate of attention's kernels, as the planner counts their FLOPs, over that of products: of documents as long as
    the config's and some times that, so that only what grows with the scores counts; what a token takes anyhow is left
    to `passes`. None where the planner's own has to do."""
    short = min(bench.config.batch.seq_len, LONGEST[bench.device.type] // LONGER)
    long = LONGER * short
    tokens = -(-tokens // long) * long
    measured, attention = bench.attention_seconds(tokens, (short, long)), bench.model.block(0).attention
    if measured is None:
        return None
    more = mixing_multiply_adds(attention, long) - mixing_multiply_adds(attention, short)
    share = 2.0 * (1 + ATTENTION_BACKWARD) * tokens * more / max(measured, NEARLY_NONE) / rate
    return share if POSSIBLE[0] <= share <= POSSIBLE[1] else None


def _multiply_adds(bench: Bench, tokens: int) -> float:
    """Of a block's products, both ways."""
    return 3.0 * tokens * linear_multiply_adds(bench.model.block(0), bench.model.hidden_size)


def _moving_seconds(bench: Bench, tokens: int, bandwidth: float) -> float:
    """That a block's products read and write, both ways, as the planner counts it."""
    block, hidden = bench.model.block(0), bench.model.hidden_size
    numbers = tokens * linear_numbers(block, hidden, 1) + linear_weights(block, hidden, 1)
    return 3.0 * ELEMENT_BYTES[bench.config.precision.dtype] * numbers / bandwidth


def _rate_of_products(bench: Bench, tokens: int, bandwidth: float) -> float:
    """FLOP/s with which the products of a block take what they took."""
    measured = bench.product_seconds(tokens)
    multiplying = max(measured / 2, measured - _moving_seconds(bench, tokens, bandwidth))
    return 2.0 * _multiply_adds(bench, tokens) / multiplying


def _overhead(bench: Bench, rate: float, bandwidth: float) -> float:
    """Of a pass over hardly any tokens, what their products do not take."""
    products = 2.0 * _multiply_adds(bench, FEW_TOKENS) / rate + _moving_seconds(bench, FEW_TOKENS, bandwidth)
    return max(NEARLY_NONE, bench.block_seconds(FEW_TOKENS) - products) / 3


def _passes(bench: Bench, machine: Machine, measured: float) -> float:
    """The constant with which a block takes what it took, by cutting the span in which it lies."""

    def of_block(passes: float) -> float:
        constants = Constants(**{**machine.constants.model_dump(), "passes": passes})
        return _of_block(bench, machine.model_copy(update={"constants": constants}))

    low, high = SPAN_OF_PASSES[bench.device.type]
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if of_block(middle) < measured else (middle, high)
    return low


SPAN_OF_PASSES = {"cpu": (0.01, 10.0), "cuda": (0.01, 1.0)}
"""What the constant may be. A CPU's caches are in it. No pass over a GPU's memory is quicker than a copy: what blocks
take less than that was counted among their products."""


def is_plausible(constants: Constants, device_type: str) -> bool:
    """Whether what was measured can be true of a machine: passes that no constant explains are other work's."""
    low, high = SPAN_OF_PASSES[device_type]
    return 1.01 * low < constants.passes and (constants.passes < high / 1.01 or device_type != "cpu")


def _of_block(bench: Bench, machine: Machine, tp: int = 1) -> float:
    """Planned seconds of a block."""
    few, more = (_whole(bench, number, machine, tp) for number in BLOCKS)
    return (more - few) / (BLOCKS[1] - BLOCKS[0])


def _whole(bench: Bench, num_blocks: int, machine: Machine, tp: int) -> float:
    model = bench.config.model.model_copy(update={"num_layers": num_blocks})
    parallel = bench.config.parallel.model_copy(update={"tp": tp})
    config = bench.config.model_copy(update={"model": model, "parallel": parallel})
    return micro_batch_seconds(config, make_plan(config, tp, bench.model.vocab_size), machine)


def _copy_rate(bench: Bench, device_type: str | None = None) -> float:
    """Bytes a second, read and written, by the device or by the host."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device_type or bench.device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / bench.seconds(lambda: target.copy_(source))


def _host_link_rate(bench: Bench) -> float:
    """Bytes a second to the host's memory, or back where that is slower; the host's is locked, as what waits there
    is."""
    here = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=bench.device)
    host = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    there = bench.seconds(lambda: host.copy_(here, non_blocking=True))
    return COPIED_BYTES / max(there, bench.seconds(lambda: here.copy_(host, non_blocking=True)))


def _halves(bench: Bench, tokens: int, num_ranks: int, link: float) -> float:
    """Rate of a gather and a scatter of a stream, over that of its sum."""
    if num_ranks == 1:
        return 1.0
    stream, make = _stream(bench, tokens)
    stream = stream[: len(stream) // num_ranks * num_ranks]
    world = Axis("world", num_ranks, dist.get_rank(), dist.group.WORLD)

    def both() -> None:
        begin_gather(begin_scatter_sum(stream, world)(), world)()

    return _sent_bytes(stream, num_ranks) / bench.seconds_behind(both, make) / link


def _blocks_seconds(bench: Bench, tokens: int, num_ranks: int) -> tuple[float, float | None]:
    """Of a block, and of one whose matrices all ranks have parts of, which tells on CPUs how they wait for each other;
    None where the model cannot be cut so. They take turns, since both are compared and a machine has its moments."""
    attention, world = bench.model.block(0).attention, Axis("tp", num_ranks, dist.get_rank(), dist.group.WORLD)
    cannot_be_cut = attention.num_kv_heads % num_ranks or bench.model.ffn_hidden_size % num_ranks
    if num_ranks == 1 or bench.device.type != "cpu" or cannot_be_cut:
        return bench.block_seconds(tokens), None
    bouts = [(bench.block_seconds(tokens), bench.block_seconds(tokens, world)) for _ in range(BOUTS)]
    alone, shared = (median(each) for each in zip(*bouts, strict=True))
    return alone, shared


def _meeting(bench: Bench, machine: Machine, measured: float, num_ranks: int) -> float:
    """Seconds a message with which such a block takes what it took. Sums by themselves are quicker: beside a block's
    work ranks come less evenly."""

    def of_block(meeting: float) -> float:
        return _of_block(bench, machine.model_copy(update={"meeting": meeting}), num_ranks)

    without = of_block(NEARLY_NONE)
    return max(0.0, measured - without) / (of_block(1.0) - without)


def _stream(bench: Bench, tokens: int) -> tuple[Tensor, Callable[[], object]]:
    """One of so many tokens, or more, and a product that makes it. Of a large one how a message begins counts little,
    which `overhead` has, or `meeting`."""
    hidden = bench.model.hidden_size
    tokens = max(tokens, LEAST_SENT_BYTES // (ELEMENT_BYTES[bench.config.precision.dtype] * hidden))
    x, weight, stream = bench.draw(tokens, hidden), bench.draw(hidden, hidden), bench.draw(tokens, hidden)
    return stream, lambda: torch.mm(x, weight, out=stream)


def _sent_bytes(stream: Tensor, num_ranks: int) -> float:
    """That a rank sends while all add a stream up."""
    return 2 * (num_ranks - 1) / num_ranks * stream.nbytes


def _memory_bytes(device: torch.device, num_ranks: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return total_bytes() / num_ranks


def _link_rate(bench: Bench, tokens: int, num_ranks: int) -> float:
    """Bytes a second that a rank sends while all of a node add up a stream. One rank has nobody to send to, and gets
    what memory does."""
    if num_ranks == 1:
        return _copy_rate(bench)
    stream, make = _stream(bench, tokens)
    return _sent_bytes(stream, num_ranks) / bench.seconds_behind(lambda: dist.all_reduce(stream), make)
