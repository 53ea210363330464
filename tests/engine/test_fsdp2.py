"""What FSDP2's engine holds in memory, and when."""

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
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config

WIDE = {"hidden_size": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "ffn_hidden_size": 4096}
RANKS = 4
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
