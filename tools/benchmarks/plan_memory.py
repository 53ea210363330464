"""The planner's bytes of a process against what processes of our own runs take on this machine's CPUs.

    python tools/benchmarks/plan_memory.py [--only dp,tp] [--steps 12] [--out FILE]

Trains configs on the demo's data with `megalite train`, over tp, sequence parallelism, pipelines, dp, ZeRO 0 to 3 of
each engine, recomputation, vocabularies up to 131,072 and sequences up to 8,192 tokens, and compares the most that the
first rank's process has taken (`memory_bytes` of its last step) with what `megalite config check` says of it. The
base, a process with all that ranks import, is measured first, apart. Prints a line a run, and at the end how far off
they are. Other processes beside it change nothing but the time that it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from arguments import count, names_of, out_file
from plan_seconds import ALWAYS, CONFIG, MIDDLE, SMALL, VOCAB, WIDE, megalite

from megalite.config.load import load_config
from megalite.config.plan import default_world_size, make_plan
from megalite.config.schema import Config
from megalite.planner.memory import memory_by_stage
from megalite.planner.process import process_bytes
from megalite.train.fork_server import RANK_MEMORY

STEPS = 12
NARROW = (128, 384, 4)
"""Hidden size, MLP width, heads; the others are those of the benchmark of seconds."""
FORKED = """
import os
from megalite.train.imports import import_all
import_all()
from megalite.host import peak_process_bytes
if os.fork():
    os.wait()
else:
    print(peak_process_bytes(), flush=True)
    os._exit(0)
"""
"""As ranks are."""


@dataclass(frozen=True)
class Case:
    """A config by what differs from the demo's, whose layout is one rank's unless it says another."""

    name: str
    sizes: tuple[int, int, int]
    num_layers: int
    tokens: int
    """Of a sequence."""
    batch: tuple[int, int]
    """Micro-batch and global batch, in sequences."""
    others: tuple[str, ...] = ()

    def overrides(self, steps: int) -> tuple[str, ...]:
        """As the command line takes them."""
        hidden, width, heads = self.sizes
        model = {"hidden_size": hidden, "ffn_hidden_size": width, "num_heads": heads, "num_kv_heads": heads}
        model["num_layers"] = self.num_layers
        batch = dict(zip(("micro_batch_size", "global_batch_size"), self.batch, strict=True))
        batch["seq_len"] = self.tokens
        layout = dict.fromkeys(("tp", "pp", "dp"), 1)
        sections = (("model", model), ("batch", batch), ("parallel", layout), ("train", {"steps": steps}))
        every = [f"{section}.{key}={value}" for section, values in sections for key, value in values.items()]
        if self.tokens != 256:
            every += [f"data.{part}=[{{path: data/demo/tokens/{part}}}]" for part in ("train", "valid")]
        return (*every, *ALWAYS, *self.others)

    def config(self, steps: int = STEPS) -> Config:
        return load_config(CONFIG, self.overrides(steps))


TP, PP, DP = ("parallel.tp=2",), ("parallel.pp=2",), ("parallel.dp=2",)
SP = (*TP, "parallel.sequence_parallel=true")
FULL, SELECTIVE, BF16 = ("train.recompute=full",), ("train.recompute=selective",), ("precision.dtype=bf16",)
FSDP2 = (*DP, "parallel.engine=fsdp2", "parallel.zero_stage=3")
ROUNDED = ("precision.reduce_bits=8", "precision.gather_bits=8")


def words(number: int) -> tuple[str, ...]:
    """A vocabulary of so many."""
    return (f"model.vocab_size={number}",)


def experts(number: int) -> tuple[str, ...]:
    """In each block, of which a token takes two."""
    return (f"model.moe={{num_experts: {number}, top_k: 2, ffn_hidden_size: 352}}",)


def deepspeed(zero_stage: int) -> tuple[str, ...]:
    """Over two ranks."""
    return (*DP, "parallel.engine=deepspeed", f"parallel.zero_stage={zero_stage}")


CASES = {
    case.name: case
    for case in (
        Case("one", MIDDLE, 6, 256, (4, 8)),
        Case("one micro-batch of 8", MIDDLE, 6, 256, (8, 8)),
        Case("one micro-batches of 1", MIDDLE, 6, 256, (1, 4)),
        Case("one wide", WIDE, 4, 256, (4, 8)),
        Case("one deep", SMALL, 16, 256, (4, 8)),
        Case("one bf16", MIDDLE, 6, 256, (4, 8), BF16),
        Case("one all recomputed", MIDDLE, 6, 256, (4, 8), FULL),
        Case("one selective", MIDDLE, 6, 256, (4, 8), SELECTIVE),
        Case("one 32k words", MIDDLE, 6, 256, (4, 8), words(32768)),
        Case("one 128k words", NARROW, 2, 256, (2, 4), words(131072)),
        Case("one 128k words wider", SMALL, 4, 256, (2, 4), words(131072)),
        Case("one 128k words bf16", NARROW, 2, 256, (2, 4), (*words(131072), *BF16)),
        Case("one 1024 tokens", MIDDLE, 6, 1024, (1, 2)),
        Case("one 4096 tokens", SMALL, 4, 4096, (1, 2)),
        Case("one 8192 tokens narrow", NARROW, 2, 8192, (1, 2)),
        Case("one 8192 tokens narrow all recomputed", NARROW, 2, 8192, (1, 2), FULL),
        Case("one 8 experts", SMALL, 6, 256, (4, 8), experts(8)),
        Case("one 64 experts", SMALL, 4, 256, (4, 8), experts(64)),
        Case("dp ZeRO 0", MIDDLE, 6, 256, (4, 8), (*DP, "parallel.zero_stage=0")),
        Case("dp ZeRO 1", MIDDLE, 6, 256, (4, 8), DP),
        Case("dp wide", WIDE, 4, 256, (4, 8), DP),
        Case("dp rounded", MIDDLE, 6, 256, (2, 8), (*DP, *ROUNDED)),
        Case("dp rounded wide", WIDE, 4, 256, (4, 8), (*DP, *ROUNDED)),
        Case("dp 128k words", NARROW, 2, 256, (2, 8), (*DP, *words(131072))),
        Case("dp 8 experts over ranks", SMALL, 6, 256, (4, 16), (*DP, "parallel.ep=2", *experts(8))),
        Case("tp", MIDDLE, 6, 256, (4, 8), TP),
        Case("tp wide", WIDE, 4, 256, (4, 8), TP),
        Case("tp 128k words", SMALL, 4, 256, (2, 4), (*TP, *words(131072))),
        Case("sp", MIDDLE, 6, 256, (4, 8), SP),
        Case("sp all recomputed", MIDDLE, 6, 256, (4, 8), (*SP, *FULL)),
        Case("sp 8192 tokens narrow", NARROW, 2, 8192, (1, 2), SP),
        Case("pp", MIDDLE, 6, 256, (2, 8), PP),
        Case("pp wide", WIDE, 4, 256, (2, 8), PP),
        Case("pp interleaved", MIDDLE, 8, 256, (2, 8), (*PP, "parallel.schedule=interleaved", "parallel.chunks=2")),
        Case("pp ZB-H1", MIDDLE, 6, 256, (2, 8), (*PP, "parallel.schedule=zb-h1")),
        Case("pp ZB-V", MIDDLE, 8, 256, (2, 8), (*PP, "parallel.schedule=zb-v")),
        Case("FSDP2", MIDDLE, 6, 256, (4, 8), FSDP2),
        Case("FSDP2 wide", WIDE, 4, 256, (4, 8), FSDP2),
        Case("FSDP2 bf16", MIDDLE, 6, 256, (4, 8), (*FSDP2, *BF16)),
        Case("FSDP2 all recomputed", MIDDLE, 6, 256, (4, 8), (*FSDP2, *FULL)),
        Case("FSDP2 128k words", NARROW, 2, 256, (2, 8), (*FSDP2, *words(131072))),
        Case("FSDP2 4096 tokens", SMALL, 4, 4096, (1, 2), FSDP2),
        Case("DeepSpeed ZeRO 0", MIDDLE, 6, 256, (4, 8), deepspeed(0)),
        Case("DeepSpeed ZeRO 1", MIDDLE, 6, 256, (4, 8), deepspeed(1)),
        Case("DeepSpeed ZeRO 1 bf16", MIDDLE, 6, 256, (4, 8), (*deepspeed(1), *BF16)),
        Case("DeepSpeed ZeRO 2", MIDDLE, 6, 256, (4, 8), deepspeed(2)),
        Case("DeepSpeed ZeRO 2 wide", WIDE, 4, 256, (4, 8), deepspeed(2)),
        Case("DeepSpeed ZeRO 3", MIDDLE, 6, 256, (4, 8), deepspeed(3)),
        Case("DeepSpeed ZeRO 3 wide", WIDE, 4, 256, (4, 8), deepspeed(3)),
    )
}


def measured_base() -> int:
    """Bytes of a process that has all that ranks import, and no model."""
    asked = [sys.executable, "-c", FORKED]
    return int(subprocess.check_output(asked, env={**RANK_MEMORY, **os.environ}, text=True))


def measured(case: Case, steps: int) -> list[int]:
    """The most that the first rank's process has taken, step after step."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        megalite("train", str(CONFIG), *case.overrides(steps), f"run.dir={folder}")
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line)["memory_bytes"] for line in lines]


def planned_tensors(config: Config) -> int:
    """Bytes at the peak of a step, on the first rank."""
    plan = make_plan(config, default_world_size(config), config.model.vocab_size or VOCAB)
    return memory_by_stage(config, plan)[0].total


def compare(names: list[str], steps: int, base: int) -> Iterator[dict[str, Any]]:
    """Each case, measured and planned."""
    for name in names:
        config = CASES[name].config(steps)
        tensors, taken = planned_tensors(config), measured(CASES[name], steps)
        planned = process_bytes(config, tensors, base)
        yield {
            "name": name,
            "ranks": default_world_size(config),
            "tensors": tensors,
            "steps": taken,
            "measured": taken[-1],
            "planned": planned,
            "off": round(planned / taken[-1] - 1, 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=names_of(CASES), default=list(CASES), help="which of the configs")
    parser.add_argument("--steps", type=count, default=STEPS, help="of each run")
    parser.add_argument("--out", type=out_file, help="a JSON file to write")
    arguments = parser.parse_args()
    base = measured_base()
    print(f"base: {base / 2**20:,.0f} MiB of a process with all that ranks import", flush=True)
    print("| ranks | config | tensors | process | planned | off |\n|--:|---|--:|--:|--:|--:|", flush=True)
    rows = []
    for row in compare(arguments.only, arguments.steps, base):
        rows.append(row)
        sizes = " | ".join(f"{row[key] / 2**20:,.0f}" for key in ("tensors", "measured", "planned"))
        print(f"| {row['ranks']} | {row['name']} | {sizes} | {100 * row['off']:+.0f} % |", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({"base": base, "runs": rows}, indent=1) + "\n", "utf-8")
    off = [abs(row["off"]) for row in rows]
    beyond = sum(each > 0.1 for each in off)
    worst = max(rows, key=lambda row: abs(row["off"]))["name"]
    said = f"median {100 * median(off):.1f} %, the worst {100 * max(off):.1f} % ({worst}), {beyond} beyond 10 %"
    print(f"{len(off)} configs: {said}")


if __name__ == "__main__":
    main()
