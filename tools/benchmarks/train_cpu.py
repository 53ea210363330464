"""Training speed on this CPU: megalite against plain PyTorch, DDP, litgpt, torch's and Megatron's tensor parallelism.

    python tools/benchmarks/train_cpu.py [--rounds 3] [--steps 8] [--vocab 32000] [--only one,dp2] [--cases megalite]
        [--out F.json] [--profile]

Workload W1: Llama style, hidden 384, 6 layers, 6 heads, ffn 1024, tied, sequences of 512, micro-batches of 4, fp32,
AdamW, clipping. Two cores: one process with two threads, or two with one. All cases get the same allocator settings and
are interleaved, round by round, because the speed of a shared machine drifts: a ratio is the median over the rounds of
what the two cases did in the same round, with the least and the most in brackets. Peers run by each of their lines:
eager, compiled, with "medium" products (`torch.set_float32_matmul_precision`), under bf16 autocast; DDP also with a
static graph whose gradients lie in its buckets. Ours stands against every one, the fastest first.
litgpt and Megatron-core run where they are installed.

`--profile` shows for each case where its first rank's time goes, and its share of the machine's own rate of products.

On a machine that others use, the clock measures them too; the ratio by CPU time is then the better one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from arguments import count, names_of, out_file
from step_profile import show_profile

from megalite.train.local import RANK_MEMORY

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 600.0
NUM_CORES = 2
INSTALL = {"litgpt": "pip install litgpt", "megatron": "pip install megatron-core"}


@dataclass(frozen=True)
class Entry:
    """A case of the benchmark."""

    name: str
    group: str
    world_size: int
    job: dict
    against: tuple[str, ...] = ()
    """The cases that ratios are taken to."""
    asked: tuple[str, float] | None = None
    """One of them, and the ratio asked for."""
    tree: Path = HERE.parents[1]
    """Whose package runs: this one's, or that of a release before."""


COMPILED = {"compile": True, "warmup": 5}
TINY = {"hidden": 64, "layers": 2, "seq_len": 64, "micro_batch_size": 1, "vocab": 512, "warmup": 50, "steps": 200}
"""Products of which take nothing: what is left is what a step costs by itself."""
MEDIUM, BF16 = {"matmul": "medium"}, {"bf16": True}
"""Of ours, the first is what `precision.products=bf16` tells torch on CPUs with AMX."""
STATIC = COMPILED | {"static": True}


def entries(vocab: int) -> list[Entry]:
    """The cases, peers before those compared with them."""
    plain, litgpt = {"case": "plain", "vocab": vocab}, {"case": "litgpt", "vocab": vocab, **COMPILED}
    megatron = {"case": "megatron-tp", "vocab": vocab, "tp": 2}
    one = [
        Entry("plain eager", "one", 1, plain),
        Entry("plain compiled", "one", 1, plain | COMPILED),
        Entry("plain compiled medium", "one", 1, plain | COMPILED | MEDIUM),
        Entry("plain compiled bf16", "one", 1, plain | COMPILED | BF16),
        Entry("litgpt", "one", 1, litgpt),
        Entry("litgpt medium", "one", 1, litgpt | MEDIUM),
        Entry("litgpt bf16", "one", 1, litgpt | BF16),
    ]
    dp2 = [
        Entry("DDP eager", "dp2", 2, plain),
        Entry("DDP compiled", "dp2", 2, plain | COMPILED),
        Entry("DDP compiled medium", "dp2", 2, plain | COMPILED | MEDIUM),
        Entry("DDP compiled bf16", "dp2", 2, plain | COMPILED | BF16),
        Entry("DDP static", "dp2", 2, plain | STATIC),
        Entry("DDP static medium", "dp2", 2, plain | STATIC | MEDIUM),
        Entry("DDP static bf16", "dp2", 2, plain | STATIC | BF16),
    ]
    tp2 = [
        Entry("torch tp2", "tp2", 2, {"case": "torch-tp", "vocab": vocab, "tp": 2}),
        Entry("megatron tp2", "tp2", 2, megatron),
        Entry("megatron tp2 medium", "tp2", 2, megatron | MEDIUM),
    ]
    ours = {"case": "megalite", "vocab": vocab, **COMPILED}
    alone = ours | {"zero_stage": 0}
    in_one, in_dp2, in_tp2 = (tuple(entry.name for entry in group) for group in (one, dp2, tp2))
    return [
        *one,
        Entry("megalite eager", "one", 1, alone | {"compile": False, "warmup": 3}, in_one),
        Entry("megalite", "one", 1, alone, in_one, ("plain eager", 1.2)),
        Entry("megalite medium", "one", 1, alone | MEDIUM, in_one),
        Entry("megalite bf16", "one", 1, ours | BF16, in_one),
        *dp2,
        Entry("megalite dp2", "dp2", 2, ours, in_dp2, ("DDP eager", 1.15)),
        Entry("megalite dp2 medium", "dp2", 2, ours | MEDIUM, in_dp2),
        Entry("megalite dp2 bf16", "dp2", 2, ours | BF16, in_dp2),
        *tp2,
        Entry("megalite tp2", "tp2", 2, ours | {"tp": 2}, in_tp2, ("megatron tp2", 1.1)),
        Entry("megalite tp2 medium", "tp2", 2, ours | {"tp": 2} | MEDIUM, in_tp2),
        Entry(
            "megalite pp2",
            "pp2",
            2,
            ours | {"pp": 2, "accum": 8, "steps": 3},
            ("megalite dp2",),
            ("megalite dp2", 0.85),
        ),
        Entry("plain tiny", "tiny", 1, {"case": "plain", **TINY}),
        Entry("megalite tiny", "tiny", 1, {**alone, **TINY, "compile": False}, ("plain tiny",), ("plain tiny", 0.667)),
    ]


GROUPS = tuple(dict.fromkeys(entry.group for entry in entries(0)))
CASES = tuple(entry.name for entry in entries(0))


def run(entry: Entry) -> dict | None:
    """Run a case once; None when it failed, with its last words on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(entry, rank, folder) for rank in range(entry.world_size)]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in ranks]
        except subprocess.TimeoutExpired:
            return None
        finally:
            for process in ranks:  # or the next benchmark is measured beside them
                process.kill()
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("{")]
    if not lines:
        print(f"{entry.name} failed:\n" + "\n".join(outputs[0][1].splitlines()[-5:]), file=sys.stderr)
        return None
    return json.loads(lines[-1])


def _start(entry: Entry, rank: int, folder: str) -> subprocess.Popen:
    env = {
        **os.environ,
        **RANK_MEMORY,
        "OMP_NUM_THREADS": str(NUM_CORES // entry.world_size),
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(entry.world_size),
        "RENDEZVOUS": f"file://{folder}/store",
        "PYTHONPATH": str(entry.tree),
    }
    command = [sys.executable, str(HERE / "cases.py"), json.dumps(entry.job)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


Results = dict[str, dict[int, dict]]
"""Of each case, what it did in each round that it came through."""


def measure(chosen: list[Entry], rounds: int) -> Results:
    """Run all cases round by round."""
    results: Results = {entry.name: {} for entry in chosen}
    for number in range(rounds):
        for entry in chosen:
            result = run(entry)
            if result is not None:
                results[entry.name][number] = result
                speed, memory = result["tokens_per_second"], result["peak_rss_mb"]
                print(f"round {number + 1}  {entry.name:22} {speed:8,.0f} tok/s  {memory:6,.0f} MB", flush=True)
    return results


def summarise(chosen: list[Entry], results: Results) -> list[dict]:
    """Median figures of each case, and its ratios to the cases it is compared with, each taken within a round: medians,
    and as `spread` the least and the most."""
    rows = []
    for entry in chosen:
        own = results[entry.name]
        if not own:
            continue
        row = {"case": entry.name, "group": entry.group}
        row |= {key: round(_median(each[key] for each in own.values()), 1) for key in MEASURED}
        ratios, spread = {}, {}
        for name in entry.against:
            pairs = [(own[number], peer) for number, peer in results.get(name, {}).items() if number in own]
            if pairs:
                found = {key: [a[key] / b[key] for a, b in pairs] for key in MEASURED}
                ratios[name] = {key: round(_median(each), 3) for key, each in found.items()}
                spread[name] = {key: [round(min(each), 3), round(max(each), 3)] for key, each in found.items()}
        row |= {"ratios": ratios, "spread": spread} if ratios else {}
        rows.append(row | ({"asked": entry.asked} if entry.asked else {}))
    return rows


MEASURED = ("tokens_per_second", "tokens_per_cpu_second", "peak_rss_mb")


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def show(rows: list[dict]) -> None:
    """A line a case, below it its ratios, the fastest peer first."""
    for row in rows:
        print(f"{row['case']:22} {row['tokens_per_second']:8,.0f} tok/s  {row['peak_rss_mb']:6,.0f} MB")
        asked_of, asked = row.get("asked", ("", 0.0))
        for name, ratio in sorted(row.get("ratios", {}).items(), key=lambda item: item[1]["tokens_per_second"]):
            said = f"  (asked {asked})" if name == asked_of else ""
            speed, by_cpu, memory = (_with_spread(ratio[key], row["spread"][name][key]) for key in MEASURED)
            print(f"  {speed} x ({by_cpu} by CPU time) {name}, {memory} of its memory{said}")


def _with_spread(ratio: float, spread: list[float]) -> str:
    """A ratio's median, and between which it lay where it was taken more than once and moved."""
    least, most = (f"{each:.2f}" for each in spread)
    return f"{ratio:.2f}" + ("" if least == most else f" [{least} to {most}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--vocab", type=count, default=32000)
    parser.add_argument("--steps", type=count, help="that are timed; 8 by default, 3 of a pipeline")
    parser.add_argument("--only", type=names_of(GROUPS), default=list(GROUPS), help="some of " + ", ".join(GROUPS))
    parser.add_argument(
        "--cases", type=names_of(CASES), help="some of " + ", ".join(CASES) + "; all of the groups by default"
    )
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    parser.add_argument("--profile", action="store_true", help="show where the first rank's time goes")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and ends what it has started
    chosen = [entry for entry in entries(arguments.vocab) if entry.group in arguments.only]
    if arguments.cases:
        chosen = [entry for entry in chosen if entry.name in arguments.cases]
    if arguments.steps:
        chosen = [replace(entry, job=entry.job | {"steps": arguments.steps}) for entry in chosen]
    for package, install in INSTALL.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed and left out; {install} to have it")
            chosen = [entry for entry in chosen if not entry.name.startswith(package)]
    if arguments.profile:
        results = {entry.name: run(replace(entry, job=entry.job | {"profile": True})) for entry in chosen}
        rows = [{"case": name, **result["profile"]} for name, result in results.items() if result is not None]
        for row in rows:
            show_profile(row["case"], row)
    else:
        rows = summarise(chosen, measure(chosen, arguments.rounds))
        show(rows)
    if arguments.out:
        given = {"vocab": arguments.vocab, "rounds": arguments.rounds}
        given |= {"steps": arguments.steps} if arguments.steps else {}
        write_record(arguments.out, given, rows)


def write_record(path: Path, given: dict, rows: list[dict]) -> None:
    """Write figures with what they were taken on."""
    import torch

    about = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor(), "torch": torch.__version__}
    path.write_text(json.dumps({**about, "cpu": _cpu_name(), **given, "rows": rows}, indent=1) + "\n")


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
