"""Training speed on this CPU: megalite against plain PyTorch, DDP, litgpt, torch's and Megatron's tensor parallelism.

    python tools/benchmarks/train_cpu.py [--rounds 3] [--vocab 32000] [--only one,dp2] [--cases megalite] [--out F.json]

Workload W1: Llama style, hidden 384, 6 layers, 6 heads, ffn 1024, tied, sequences of 512, micro-batches of 4, fp32,
AdamW, clipping. Two cores: one process with two threads, or two with one. All cases get the same allocator settings and
are interleaved, round by round, because the speed of a shared machine drifts; the figure of a case is its median over
the rounds, and what counts is the ratio to the named peer in the same run. litgpt runs where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from arguments import count, names_of, out_file

from megalite.train.local import ALLOCATOR

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
    against: str = ""
    """The case that the ratio is taken to."""
    at_least: float = 0.0
    """The ratio asked for."""


def entries(vocab: int) -> list[Entry]:
    """The cases, peers before those compared with them."""
    compiled = {"compile": True, "warmup": 5}
    pipeline = {"pp": 2, "accum": 8, **compiled, "steps": 3}
    one, dp2, tp2, pp2 = "one", "dp2", "tp2", "pp2"
    return [
        Entry("plain eager", one, 1, {"case": "plain", "vocab": vocab}),
        Entry("plain compiled", one, 1, {"case": "plain", "vocab": vocab, **compiled}),
        Entry("litgpt", one, 1, {"case": "litgpt", "vocab": vocab, **compiled}),
        Entry("megalite eager", one, 1, {"case": "megalite", "vocab": vocab, "zero_stage": 0}, "plain eager"),
        Entry(
            "megalite", one, 1, {"case": "megalite", "vocab": vocab, "zero_stage": 0, **compiled}, "plain eager", 1.2
        ),
        Entry("DDP eager", dp2, 2, {"case": "plain", "vocab": vocab}),
        Entry("megalite dp2", dp2, 2, {"case": "megalite", "vocab": vocab, **compiled}, "DDP eager", 1.15),
        Entry("torch tp2", tp2, 2, {"case": "torch-tp", "vocab": vocab, "tp": 2}),
        Entry("megatron tp2", tp2, 2, {"case": "megatron-tp", "vocab": vocab, "tp": 2}),
        Entry("megalite tp2", tp2, 2, {"case": "megalite", "vocab": vocab, "tp": 2, **compiled}, "megatron tp2", 1.1),
        Entry("megalite pp2", pp2, 2, {"case": "megalite", "vocab": vocab, **pipeline}, "megalite dp2", 0.85),
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
            for process in ranks:
                process.kill()
            return None
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("{")]
    if not lines:
        print(f"{entry.name} failed:\n" + "\n".join(outputs[0][1].splitlines()[-5:]), file=sys.stderr)
        return None
    return json.loads(lines[-1])


def _start(entry: Entry, rank: int, folder: str) -> subprocess.Popen:
    env = {
        **os.environ,
        **ALLOCATOR,
        "OMP_NUM_THREADS": str(NUM_CORES // entry.world_size),
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(entry.world_size),
        "RENDEZVOUS": f"file://{folder}/store",
    }
    command = [sys.executable, str(HERE / "cases.py"), json.dumps(entry.job)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def measure(chosen: list[Entry], rounds: int) -> dict[str, list[dict]]:
    """Run all cases round by round."""
    results: dict[str, list[dict]] = {entry.name: [] for entry in chosen}
    for number in range(rounds):
        for entry in chosen:
            result = run(entry)
            if result is not None:
                results[entry.name].append(result)
                speed, memory = result["tokens_per_second"], result["peak_rss_mb"]
                print(f"round {number + 1}  {entry.name:16} {speed:8,.0f} tok/s  {memory:6,.0f} MB", flush=True)
    return results


def summarise(chosen: list[Entry], results: dict[str, list[dict]]) -> list[dict]:
    """Median figures of each case, and its ratio to the case it is compared with."""

    def median(name: str, key: str) -> float:
        return statistics.median(result[key] for result in results[name])

    rows = []
    for entry in chosen:
        if not results[entry.name]:
            continue
        row = {"case": entry.name, "group": entry.group}
        row |= {key: round(median(entry.name, key), 1) for key in ("tokens_per_second", "peak_rss_mb")}
        if results.get(entry.against):
            for key in ("tokens_per_second", "peak_rss_mb"):
                row[f"{key}_ratio"] = round(median(entry.name, key) / median(entry.against, key), 3)
            row |= {"against": entry.against, "asked": entry.at_least}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--vocab", type=count, default=32000)
    parser.add_argument("--only", type=names_of(GROUPS), default=list(GROUPS), help="some of " + ", ".join(GROUPS))
    parser.add_argument(
        "--cases", type=names_of(CASES), help="some of " + ", ".join(CASES) + "; all of the groups by default"
    )
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    chosen = [entry for entry in entries(arguments.vocab) if entry.group in arguments.only]
    if arguments.cases:
        chosen = [entry for entry in chosen if entry.name in arguments.cases]
    for package, entry_name in (("litgpt", "litgpt"), ("megatron", "megatron tp2")):
        if importlib.util.find_spec(package) is None:
            print(f"{entry_name}: {package} is not installed and left out; {INSTALL[package]} to have it")
            chosen = [entry for entry in chosen if entry.name != entry_name]
    rows = summarise(chosen, measure(chosen, arguments.rounds))
    for row in rows:
        ratio = f"{row['tokens_per_second_ratio']:.2f}x {row['against']}" if "against" in row else ""
        asked = f"(asked {row['asked']})" if row.get("asked") else ""
        speed, memory = row["tokens_per_second"], row["peak_rss_mb"]
        print(f"{row['case']:16} {speed:8,.0f} tok/s  {memory:6,.0f} MB  {ratio} {asked}")
    if arguments.out:
        import torch

        about = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor(), "torch": torch.__version__}
        record = {**about, "cpu": _cpu_name(), "vocab": arguments.vocab, "rounds": arguments.rounds, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
