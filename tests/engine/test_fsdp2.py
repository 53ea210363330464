"""What FSDP2's engine holds in memory, and when; and what its blocks are compiled to."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.config.plan import make_plan
from megalite.engine.build import build_engine
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from tests.kit.graphs import make_no_kernels
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

WIDE = {"hidden_size": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "ffn_hidden_size": 4096}
RANKS = 4
SPARSE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}}
KINDS: dict[str, dict] = {
    "fp32": {},
    "bf16": {"precision": {"dtype": "bf16"}},
    "recomputed": {"train": {"compile": "on", "recompute": "full"}},
    "experts": {"model": SPARSE},
}
"""Sections of configs, by what is compiled."""

M_MMAP_THRESHOLD = -3


def peak_of_building() -> tuple[int, int, int]:
    """Bytes of the whole model, of this rank's rows of weights and moments, and those by which memory rose at most."""
    config = tiny_config(
        model=WIDE, optimizer={"name": "lion"}, parallel={"dp": RANKS, "zero_stage": 3, "engine": "fsdp2"}
    )
    plan = make_plan(config, RANKS)
    axes = connect(Mesh(dp=RANKS), dist.get_rank())
    gc.collect()
    ctypes.CDLL("libc.so.6").mallopt(
        M_MMAP_THRESHOLD, 2**20
    )  # so that what is freed is gone at once, whatever was before
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak()
    engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
    rose = _peak() - before
    kept = sum(tensor.nbytes for part in engine.slices() for tensor in part.tensors.values())
    return 4 * plan.num_parameters, kept, rose


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_no_rank_has_the_whole_model():
    """Weights are read where they are divided: a rank never holds as many bytes as the model, moments or not."""
    for whole, kept, rose in run_ranks(peak_of_building, RANKS):
        assert kept < 0.6 * whole, "a quarter of the weights, and of Lion's one moment"
        assert kept < rose < 0.7 * whole, (whole, kept, rose)


def count_graphs() -> tuple[dict[str, tuple[int, int]], tuple[int, int], tuple[int, int]]:
    """Graphs and breaks of the blocks in three steps, for models whose blocks are alike; and with experts over ranks
    under this engine and the native one. Graphs are made and divided as for kernels, which would take most of the time
    and are not."""
    make_no_kernels()
    over_ranks = {"model": SPARSE, "parallel": {"ep": 2}}
    native = {"model": SPARSE, "parallel": {"ep": 2, "zero_stage": 1, "engine": "native"}}
    return {name: _count(each) for name, each in KINDS.items()}, _count(over_ranks), _count(native)


def _count(sections: dict[str, dict]) -> tuple[int, int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    parallel = {"dp": 2, "zero_stage": 3, "engine": "fsdp2"} | sections.get("parallel", {})
    rank = start_rank(tiny_config(**{"train": {"compile": "on"}, **sections, "parallel": parallel}))
    rank.train(0, 3)
    rank.engine.close()
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_a_divided_block_is_one_graph():
    """Gathering and letting go of its weights stand around it, and all blocks share it. Tokens that travel to experts
    end graphs, as they do under the native engine."""
    for found, over_ranks, native in run_ranks(count_graphs, 2):
        assert found == dict.fromkeys(KINDS, (1, 0))
        assert over_ranks == native
        assert native[1] > 0
