"""Checkpoints: saving and loading against torch.distributed.checkpoint and DeepSpeed, and what a background save costs.

    python tools/benchmarks/checkpoint.py [--rounds 3] [--worlds 1,2] [--cases dcp] [--scratch DIR] [--out F.json]

One state for all: a Llama of 120 million parameters in fp32, weights and two moments, 1.4 GB, on one rank, and on two
with ZeRO-1. Each case runs in processes of its own, interleaved round by round, because a shared machine's disk drifts;
figures are medians, and what counts is the ratio in one run. Loading reads what has just been written, from the page
cache, in all cases. Before each save a file of WARM_BYTES is written and removed: a virtual machine gives free memory
back to its host, and whoever is the first to fill it again would pay up to 3 s of CPU for it.

    megalite    `save` and wait; load: all checksums, then weights into the module, weights and moments into ZeRO
    megalite - sync   the same without waiting for the disk, as DeepSpeed saves: not an option, for comparison only
    behind      the same state saved while training goes on: for how long the loop stood still, the second time
    dcp         torch.distributed.checkpoint.save and load of the same tensors, cut over the ranks as FSDP does; synced
    deepspeed   its save_checkpoint and load_checkpoint of the same model; it writes the weights twice and syncs nothing
    deepspeed + sync   its files synced to the disk too, as the others' are
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arguments import count, folder, listed, names_of, out_file

from megalite.train.local import RANK_MEMORY

CASES = ("megalite", "megalite - sync", "behind", "dcp", "deepspeed", "deepspeed + sync")
TIMEOUT_SECONDS = 600.0
NUM_CORES = 2
WARM_BYTES = 3 * 10**9


@dataclass(frozen=True)
class Job:
    """What one rank is to do."""

    case: str
    folder: str
    """Where to write."""
    layers: int = 8


def config_of(job: Job) -> Any:
    """The model and its engine."""
    import torch.distributed as dist

    from megalite.config.schema import Config

    return Config(
        model={
            "hidden_size": 1024,
            "num_layers": job.layers,
            "num_heads": 16,
            "ffn_hidden_size": 2816,
            "vocab_size": 8192,
            "tie_embeddings": False,
        },
        parallel={"dp": dist.get_world_size(), "zero_stage": 1},
        batch={"micro_batch_size": 4, "global_batch_size": 4 * dist.get_world_size(), "seq_len": 128},
        train={"steps": 100, "compile": "off"},
    )


class Rank:
    """An engine with a random state."""

    def __init__(self, job: Job):
        import torch
        import torch.distributed as dist

        from megalite.config.plan import make_plan
        from megalite.engine.build import build_engine
        from megalite.model.initialize import FreshWeights
        from megalite.parallel.axes import connect
        from megalite.parallel.mesh import Mesh

        self.config, self.device = config_of(job), torch.device("cpu")
        self.plan = make_plan(self.config, dist.get_world_size())
        self.axes = connect(Mesh(1, dist.get_world_size(), 1, 1), dist.get_rank())
        source = FreshWeights(self.plan.model, seed=1)
        self.engine = build_engine(self.config, self.plan, self.axes, self.device, source)
        for part in self.engine.slices():
            for kind, tensor in part.tensors.items():
                tensor.uniform_(0.0, 1e-4) if kind != "weight" else None

    def step(self) -> float:
        """One training step on random tokens; its seconds."""
        import torch

        from megalite.data.loader import Batch

        count, length = 4 * 128, 128
        tokens = torch.randint(0, 8192, (count,))
        borders = torch.arange(0, count + 1, length, dtype=torch.int32)
        positions = torch.arange(length).repeat(4)
        mask = torch.ones(count, dtype=torch.bool)
        start = time.perf_counter()
        self.engine.train_step([Batch(tokens, tokens, mask, positions, borders, length, torch.arange(count))], 1e-5)
        return time.perf_counter() - start


def run_megalite(job: Job) -> dict[str, float]:
    """Save and load, waiting for both."""
    from megalite.checkpoint.format import Progress
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.checkpoint.tensor_file import HashedFile
    from megalite.checkpoint.writer import save
    from megalite.optim.rules import state_kinds

    rank = Rank(job)
    if job.case.endswith("- sync"):
        os.fsync = lambda file: None
        HashedFile._begin_writeback = lambda file: None
    options = {"plan": rank.plan, "config_text": "", "data": {}, "device": rank.device}
    root = Path(job.folder)

    def save_it() -> None:
        save(root, rank.engine, rank.axes, progress=Progress(step=1, num_updates=1), **options)

    def verify_it() -> None:
        reader = CheckpointReader(root / "step-0000001")
        assert reader.verify(rank.axes.global_rank, rank.axes.world.size) == []

    def read_it() -> None:
        reader = CheckpointReader(root / "step-0000001")
        rank.engine.load(reader.source("weight"), {kind: reader.source(kind) for kind in state_kinds()}, 1)

    figures = timed(job, save=save_it, verify=verify_it, read=read_it)
    for unit in ("seconds", "cpu_seconds"):
        figures[f"load_{unit}"] = figures[f"verify_{unit}"] + figures[f"read_{unit}"]
    return figures


def run_behind(job: Job) -> dict[str, float]:
    """Train, save behind the training twice, and see what it costs."""
    from megalite.checkpoint.background import Saver
    from megalite.checkpoint.format import Progress
    from megalite.checkpoint.saving import Target
    from megalite.parallel.collectives import agree

    rank = Rank(job)
    target = Target(Path(job.folder), rank.plan, "", {})
    saver = Saver(target, rank.engine, rank.axes, rank.device, asynchronous=True)
    rank.step()
    forget_peak()
    normal = statistics.median(rank.step() for _ in range(3))
    peak = memory_mb("VmHWM")
    forget_peak()
    for _ in range(3):
        rank.step()
    figures: dict[str, float] = {"step_seconds": normal, "steps_extra_mb": memory_mb("VmHWM") - peak}
    for name, step in (("first", 1), ("second", 2)):
        forget_peak()
        saver.start(Progress(step=step))
        outcome, lost = None, 0.0
        while outcome is None:
            lost += rank.step() - normal
            busy, failed = agree(saver.flags(), rank.axes.world, rank.device)
            outcome = saver.settle(is_busy=busy, has_failed=failed)
        assert outcome.error is None, outcome.error
        figures[f"{name}_stall_seconds"] = outcome.stalled_seconds
        figures[f"{name}_lost_seconds"] = outcome.stalled_seconds + lost
        figures[f"{name}_extra_mb"] = memory_mb("VmHWM") - peak
    figures["share_mb"] = saver._snapshots._buffer.nbytes / 1e6
    figures["commit_seconds"] = outcome.seconds
    return figures


def run_dcp(job: Job) -> dict[str, float]:
    """The same tensors, plain on one rank, cut on dim 0 over two."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from megalite.architecture.weights import weight_table
    from megalite.config.optimizers import RULES
    from megalite.config.plan import make_plan

    size = dist.get_world_size()
    plan = make_plan(config_of(job), size)
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        local = torch.rand(shape[0] // size, *shape[1:])
        return DTensor.from_local(local, mesh, [Shard(0)]) if mesh is not None else local

    kinds = ("weight", *RULES["adamw"].state)
    state = {f"{kind}/{row.name}": tensor(row.shape) for kind in kinds for row in weight_table(plan.model).values()}
    folder = Path(job.folder) / "dcp"
    return timed(
        job, save=lambda: dcp.save(state, checkpoint_id=folder), load=lambda: dcp.load(state, checkpoint_id=folder)
    )


def run_deepspeed(job: Job) -> dict[str, float]:
    """DeepSpeed's own, of the same model, with torch's AdamW, whose moments it knows how to save."""
    import torch
    import torch.distributed as dist

    from megalite.config.plan import make_plan
    from megalite.engine.build import build_stage
    from megalite.engine.deepspeed.config import deepspeed_config
    from megalite.engine.deepspeed.start import start_deepspeed
    from megalite.model.initialize import FreshWeights
    from megalite.parallel.axes import connect
    from megalite.parallel.mesh import Mesh

    start_deepspeed("cpu")
    import deepspeed

    config = config_of(job)
    plan = make_plan(config, dist.get_world_size())
    axes = connect(Mesh(1, dist.get_world_size(), 1, 1), dist.get_rank())
    stage = build_stage(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, seed=1))
    optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
    json_config = deepspeed_config(config, plan)
    engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=json_config, dist_init_required=False)
    for weight in engine.optimizer.fp32_groups_flat_partition:
        moments = {kind: torch.rand_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(1.0), **moments}

    def save_it() -> None:
        engine.save_checkpoint(job.folder, tag="it")
        if job.case.endswith("sync"):
            for path in sorted(Path(job.folder).rglob("*.pt"))[dist.get_rank() :: dist.get_world_size()]:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())

    return timed(job, save=save_it, load=lambda: engine.load_checkpoint(job.folder, tag="it"))


def timed(job: Job, **actions: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each, until the last rank is done, and how far the save's peak of memory lay above the memory before.

    Of loading, memory says little: where files are mapped, the page cache counts as the process's own.
    """
    import torch.distributed as dist

    figures: dict[str, float] = {}
    for name, action in actions.items():
        before = forget_peak()
        if name == "save" and dist.get_rank() == 0:
            warm_memory(Path(job.folder))
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        action()
        dist.barrier()
        figures[f"{name}_seconds"] = time.perf_counter() - start
        figures[f"{name}_cpu_seconds"] = time.process_time() - cpu
        if name == "save":
            figures["save_extra_mb"] = memory_mb("VmHWM") - before
    return figures


def warm_memory(folder: Path) -> None:
    """Have as much free memory in this machine's own hands as the page cache is about to take."""
    path, block = folder / "warm", bytes(2**22)
    with open(path, "wb", buffering=0) as file:
        for _ in range(WARM_BYTES // len(block)):
            file.write(block)
    path.unlink()


def forget_peak() -> float:
    """Let the peak of memory begin at the memory of now; returns that, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


def memory_mb(name: str) -> float:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


def rank_main(job: Job) -> None:
    """One rank of a case: prints its figures on rank 0."""
    import torch

    from megalite.engine.runtime import connect_processes

    torch.manual_seed(int(os.environ["RANK"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    connect_processes(rank=rank, world_size=size, device_type="cpu", init_method=os.environ["RENDEZVOUS"])
    runs = {"megalite": run_megalite, "megalite - sync": run_megalite, "behind": run_behind, "dcp": run_dcp}
    figures = runs.get(job.case, run_deepspeed)(job)
    if rank == 0:
        print(json.dumps(figures), flush=True)
    os._exit(0)  # without waiting for anyone


def run_case(job: Job, world_size: int) -> dict[str, float] | None:
    """Run a case once; None when it failed, with its last words on stderr."""
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, __file__, "--rank", json.dumps(asdict(job))]
        ranks = []
        for rank in range(world_size):
            env = {
                **os.environ,
                **RANK_MEMORY,
                "OMP_NUM_THREADS": str(NUM_CORES // world_size),
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "RENDEZVOUS": f"file://{meeting}/store",
            }
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
        try:
            outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in ranks]
        except subprocess.TimeoutExpired:
            for process in ranks:
                process.kill()
            return None
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("{")]
    if not lines:
        print(f"{job.case} failed:\n" + "\n".join(outputs[0][1].splitlines()[-8:]), file=sys.stderr)
        return None
    return json.loads(lines[-1])


def measure(arguments: argparse.Namespace) -> list[dict]:
    """Run all cases round by round; medians over the rounds."""
    chosen = [(size, case) for size in arguments.worlds for case in arguments.cases]
    results: dict[tuple[int, str], list[dict]] = {each: [] for each in chosen}
    for number in range(arguments.rounds):
        for size, case in results:
            folder = tempfile.mkdtemp(dir=arguments.scratch)
            figures = run_case(Job(case, folder, arguments.layers), size)
            shutil.rmtree(folder)
            if figures is not None:
                results[size, case].append(figures)
                shown = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
                print(f"round {number + 1}  {size} rank(s)  {case:17} {shown}", flush=True)
    rows = []
    for (size, case), found in results.items():
        if found:
            keys = found[0]
            rows.append({"ranks": size, "case": case, **{k: statistics.median(f[k] for f in found) for k in keys}})
    return rows


def show(rows: list[dict]) -> None:
    """Print the medians, and what megalite's are to each peer's."""
    by_name = {(row["ranks"], row["case"]): row for row in rows}
    for (size, case), row in sorted(by_name.items(), key=lambda item: (item[0][0], CASES.index(item[0][1]))):
        ours, text = by_name.get((size, "megalite")), f"{size} rank(s)  {case:17}"
        if case == "behind":
            stalls = [row[f"{which}_stall_seconds"] for which in ("first", "second")]
            text += f" stall {stalls[0] * 1e3:.0f}, then {stalls[1] * 1e3:.0f} ms"
            text += f" ({stalls[1] / ours['save_seconds']:.1%} of a save)" if ours else ""
            text += f"; lost {row['second_lost_seconds']:.2f} s, a step is {row['step_seconds']:.2f} s"
            text += f"; peak memory + {row['second_extra_mb']:,.0f} MB, its share is {row['share_mb']:,.0f} MB"
            text += f", of steps without a save {row['steps_extra_mb']:+,.0f} MB"
        else:
            for what in ("save", "load"):
                text += f"  {what} {row[f'{what}_seconds']:.2f} s, CPU {row[f'{what}_cpu_seconds']:.2f} s"
                if ours and case != "megalite":
                    text += f" (megalite {row[f'{what}_seconds'] / ours[f'{what}_seconds']:.2f}x as fast)"
            if "verify_seconds" in row:
                text += f" (checksums {row['verify_seconds']:.2f} s)"
            text += f"  peak memory of the save + {row['save_extra_mb']:,.0f} MB"
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--worlds", type=listed(count), default=[1, 2], help="numbers of ranks, comma-separated")
    parser.add_argument("--cases", type=names_of(CASES), default=CASES, help="some of " + ", ".join(CASES))
    parser.add_argument("--layers", type=count, default=8)
    parser.add_argument("--scratch", type=folder, help="where checkpoints are written; the system's temporary folder")
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(Job(**json.loads(arguments.rank)))
    rows = measure(arguments)
    show(rows)
    if arguments.out:
        import torch

        about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "layers": arguments.layers}
        record = {**about, "scratch": str(arguments.scratch), "rounds": arguments.rounds, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
