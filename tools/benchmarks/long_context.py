"""Memory of long sequences under context parallelism on this machine, against one rank and the planner.

    python tools/benchmarks/long_context.py [--tokens 32768] [--documents 1] [--hidden 256] [--layers 4]
        [--recompute none] [--cp 1,2,4] [--kinds allgather,ulysses,ring] [--out F.json]

One sequence a step, cut into documents of drawn lengths, fp32, AdamW. `rise` is how far a rank's memory rises in its
second step above what it has before it: activations, gradients that come and go, buffers. `planned` is the planner's
sum of activations, head and buffers. `sent` is what the planner says that a rank sends over cp in a step, which the
tests hold against bytes counted. Attention takes as long as the busiest rank: `work` is its share, times the ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from arguments import count, listed, names_of, out_file
from train_cpu import write_record

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.data.loader import Batch
from megalite.engine.build import build_engine
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import connect
from megalite.parallel.context import deal, spans_of
from megalite.parallel.mesh import Mesh
from megalite.planner.memory import memory_by_stage
from megalite.planner.traffic import traffic_by_stage

KINDS = ("allgather", "ulysses", "ring")
STEPS = 2


def config_of(given: argparse.Namespace, cp: int, kind: str) -> Config:
    """The model and its one sequence a step."""
    return Config(
        model={
            "hidden_size": given.hidden,
            "num_layers": given.layers,
            "num_heads": given.hidden // 32,
            "num_kv_heads": max(1, given.hidden // 128),
            "ffn_hidden_size": -(-8 * given.hidden // 48) * 16,
            "vocab_size": 4096,
            "tie_embeddings": True,
        },
        batch={"seq_len": given.tokens, "micro_batch_size": 1, "global_batch_size": 1},
        parallel={"cp": cp, "cp_kind": kind},
        precision={"dtype": "fp32"},
        train={"steps": STEPS, "recompute": given.recompute, "compile": "off"},
    )


def borders_of(given: argparse.Namespace) -> list[int]:
    """Where documents begin, drawn evenly."""
    generator = torch.Generator().manual_seed(0)
    inner = torch.randperm(given.tokens - 1, generator=generator)[: given.documents - 1] + 1
    return [0, *sorted(inner.tolist()), given.tokens]


def batch_of(given: argparse.Namespace) -> Batch:
    """The step's one sequence."""
    tokens = torch.randint(4096, (given.tokens,), generator=torch.Generator().manual_seed(1))
    borders = torch.tensor(borders_of(given), dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in borders.diff().tolist()])
    mask = torch.ones(given.tokens, dtype=torch.bool)
    return Batch(tokens, tokens.roll(-1), mask, positions, borders, given.tokens, torch.arange(given.tokens))


def run_rank(rank: int, store: str, given: argparse.Namespace, cp: int, kind: str, told: str) -> None:
    """One rank: two steps, the second one measured."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // cp))
    dist.init_process_group("gloo", store=dist.FileStore(store, cp), rank=rank, world_size=cp)
    config = config_of(given, cp, kind)
    plan = make_plan(config, cp)
    axes = connect(Mesh(cp=cp), rank)
    engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 0))
    batch = batch_of(given)
    engine.train_step([batch], 1e-4)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began = time.perf_counter()
    engine.train_step([batch], 1e-4)
    seconds = time.perf_counter() - began
    Path(told, str(rank)).write_text(json.dumps({"rise": _memory("VmHWM") - before, "seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


def _memory(name: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(given: argparse.Namespace, cp: int, kind: str) -> dict:
    """A row of the table: the rank with the largest rise."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store", given, cp, kind, folder), nprocs=cp)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(cp)]
    config = config_of(given, cp, kind)
    plan = make_plan(config, cp)
    (memory,), (traffic,) = memory_by_stage(config, plan), traffic_by_stage(config, plan)
    borders = borders_of(given)
    work = [sum(span.work() for span in spans_of(hand, borders)) for hand in deal(borders, cp)] if cp > 1 else [1]
    return {
        "cp": cp,
        "kind": kind if cp > 1 else "",
        "rise_mb": round(max(each["rise"] for each in found) / 1e6),
        "planned_mb": round((memory.activations + memory.head + memory.buffers) / 1e6),
        "sent_mb": round(traffic.cp / 1e6, 1),
        "work": round(max(work) * cp / sum(work), 3) if kind != "ulysses" else 1.0,
        "seconds": round(max(each["seconds"] for each in found), 2),
    }


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with exit code 2 where options do not go together."""
    heads = given.hidden // 32
    if given.documents > given.tokens:
        parser.error(f"--documents: found {given.documents}, which {given.tokens} tokens are too few for")
    for cp in given.cp:
        if given.tokens % (2 * cp):
            parser.error(f"--tokens: found {given.tokens}, which 2 x {cp} does not divide")
        if "ulysses" in given.kinds and (not heads or heads % cp):
            parser.error(f"--kinds: ulysses wants a number of ranks that divides {heads} heads, found {cp}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=count, default=32768)
    parser.add_argument("--documents", type=count, default=1)
    parser.add_argument("--hidden", type=count, default=256)
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--cp", type=listed(count), default=[1, 2, 4])
    parser.add_argument("--kinds", type=names_of(KINDS), default=list(KINDS))
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    given = parser.parse_args()
    check(parser, given)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # of ranks: what is freed goes back, and does not lie in pieces
    rows = [measure(given, cp, kind) for cp in given.cp for kind in given.kinds if cp > 1 or kind == given.kinds[0]]
    one = next((row["rise_mb"] for row in rows if row["cp"] == 1), None)
    for row in rows:
        of_one = "" if one is None else f"  {row['rise_mb'] / one:5.2f} of one rank's"
        print(
            f"cp {row['cp']} {row['kind']:10} rise {row['rise_mb']:6} MB{of_one}  planned {row['planned_mb']:6} MB"
            f"  sent {row['sent_mb']:8} MB  work {row['work']:.3f}  {row['seconds']:6.2f} s"
        )
    if given.out:
        write_record(given.out, {key: value for key, value in vars(given).items() if key != "out"}, rows)


if __name__ == "__main__":
    main()
