"""The planner's seconds, and memory of processes, against steps of our own runs on this machine.

    python tools/benchmarks/plan_seconds.py [--only tp,pp] [--passes 2] [--out FILE]

Calibrates with a model of each width on one rank and on two (`megalite plan calibrate`, which measures the products of
its config's own model), and behind each trains configs of this width, of other depths, batches and layouts, on the
demo's data with `megalite train`, ten steps each. Compares medians of the last seven with what `megalite plan` says by
that file; and the most that the first rank's process has taken, with `megalite config check`'s. Nothing else may run
beside it, and where the machine itself does not keep the pace that it was calibrated at (`pace.py`), the run does not
count: it is calibrated anew. Prints a line a run, and at the end a table and the pairs that the plan has in another
order than the one that was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

from arguments import count, names_of, out_file
from pace import Moment

from megalite.config.load import load_config
from megalite.config.plan import default_world_size
from megalite.planner.estimate import Estimate, estimate
from megalite.planner.machines import Machine, load_machine

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
VOCAB = 4096
"""Of the demo's tokenizer."""
STEPS, SETTLED = 10, 3
APART = 0.1
"""By which seconds differ that a plan must have in their order."""
CALIBRATIONS = 4
"""Of a width on so many ranks, at most, in a pass over the configs."""
ALWAYS = (
    "schedule.warmup_steps=2",
    "train.device=cpu",
    "train.eval_every=null",
    "train.compile=off",
    "checkpoint.every=null",
    "monitor.log_every=1",
)
SMALL, MIDDLE, WIDE = (256, 704, 4), (384, 1024, 6), (768, 2048, 12)
"""Hidden size, MLP width, heads."""


@dataclass(frozen=True)
class Case:
    """A config by what differs from the demo's."""

    name: str
    ranks: int
    sizes: tuple[int, int, int]
    num_layers: int
    batch: tuple[int, int]
    """Micro-batch and global batch, in sequences."""
    others: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple[int, tuple[int, int, int]]:
        """What a machine is calibrated for."""
        return self.ranks, self.sizes

    @property
    def overrides(self) -> tuple[str, ...]:
        """As the command line takes them."""
        hidden, width, heads = self.sizes
        model = {"hidden_size": hidden, "ffn_hidden_size": width, "num_heads": heads, "num_kv_heads": heads}
        model["num_layers"] = self.num_layers
        batch = dict(zip(("micro_batch_size", "global_batch_size"), self.batch, strict=True))
        layout = {
            key: 1 for key in ("tp", "pp", "dp") if not any(each.startswith(f"parallel.{key}=") for each in self.others)
        }
        if self.ranks > 1 and "parallel.tp=2" not in self.others and "parallel.pp=2" not in self.others:
            layout["dp"] = self.ranks
        sections = (("model", model), ("batch", batch), ("parallel", layout))
        return (
            *(f"{name}.{key}={value}" for name, each in sections for key, value in each.items()),
            *self.others,
            f"train.steps={STEPS}",
            *ALWAYS,
        )


TP, SP = ("parallel.tp=2",), ("parallel.tp=2", "parallel.sequence_parallel=true")
PP, ZBV = ("parallel.pp=2",), ("parallel.pp=2", "parallel.schedule=zb-v")
LONG = (
    "batch.seq_len=1024",
    "data.train=[{path: data/demo/tokens/train}]",
    "data.valid=[{path: data/demo/tokens/valid}]",
)
FULL, SELECTIVE, FSDP2 = (
    ("train.recompute=full",),
    ("train.recompute=selective",),
    ("parallel.engine=fsdp2", "parallel.zero_stage=3"),
)
CASES = {
    case.name: case
    for case in (
        Case("one", 1, MIDDLE, 6, (4, 8)),
        Case("one micro-batch of 8", 1, MIDDLE, 6, (8, 8)),
        Case("one micro-batches of 2", 1, MIDDLE, 6, (2, 8)),
        Case("one wide", 1, WIDE, 4, (4, 8)),
        Case("one deep", 1, SMALL, 16, (4, 8)),
        Case("one all recomputed", 1, MIDDLE, 6, (4, 8), FULL),
        Case("one selective", 1, MIDDLE, 6, (4, 8), SELECTIVE),
        Case("one wide all recomputed", 1, WIDE, 4, (4, 8), FULL),
        Case("one 1024 tokens", 1, MIDDLE, 6, (1, 2), LONG),
        Case("one small", 1, SMALL, 6, (8, 16)),
        Case("one groups of heads", 1, WIDE, 4, (4, 4), ("model.num_kv_heads=4",)),
        Case("dp", 2, MIDDLE, 6, (4, 8)),
        Case("dp wide", 2, WIDE, 4, (4, 8)),
        Case("dp deep", 2, SMALL, 16, (4, 8)),
        Case("dp two micro-batches", 2, MIDDLE, 6, (2, 8)),
        Case("dp all recomputed", 2, MIDDLE, 6, (4, 8), FULL),
        Case("dp FSDP2", 2, MIDDLE, 6, (4, 8), FSDP2),
        Case("dp FSDP2 wide", 2, WIDE, 4, (4, 8), FSDP2),
        Case("tp", 2, MIDDLE, 6, (4, 8), TP),
        Case("tp wide", 2, WIDE, 4, (4, 8), TP),
        Case("tp deep", 2, SMALL, 16, (4, 8), TP),
        Case("tp sequence parallel", 2, MIDDLE, 6, (4, 8), SP),
        Case("tp sequence parallel wide", 2, WIDE, 4, (4, 8), SP),
        Case("tp all recomputed", 2, MIDDLE, 6, (4, 8), TP + FULL),
        Case("tp 1024 tokens", 2, MIDDLE, 6, (1, 2), TP + LONG),
        Case("pp", 2, MIDDLE, 6, (2, 8), PP),
        Case("pp wide", 2, WIDE, 4, (2, 8), PP),
        Case("pp 8 micro-batches", 2, MIDDLE, 6, (1, 8), PP),
        Case("pp ZB-V", 2, MIDDLE, 8, (2, 8), ZBV),
        Case("pp interleaved", 2, MIDDLE, 8, (2, 8), (*PP, "parallel.schedule=interleaved", "parallel.chunks=2")),
    )
}


def megalite(*arguments: str) -> None:
    """Run a command; what it says is shown when it fails."""
    done = subprocess.run([sys.executable, "-m", "megalite", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"megalite {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def calibrate(folder: Path, ranks: int, sizes: tuple[int, int, int]) -> Path:
    """The machine's file for so many ranks and models of a width."""
    found, model = folder / f"machine-{ranks}-{sizes[0]}.yaml", Case("", 1, sizes, 6, (4, 4)).overrides
    megalite(
        "plan", "calibrate", str(CONFIG), *model, "--ranks", str(ranks), "--out", str(found), "--vocab-size", str(VOCAB)
    )
    return found


def train(case: Case, folder: Path) -> tuple[float, int]:
    """Seconds of a step, once the first ones are over, and bytes of the first rank's process."""
    megalite("train", str(CONFIG), *case.overrides, f"run.dir={folder}")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return median(step["seconds"] for step in steps[SETTLED:]), steps[-1]["memory_bytes"]


@dataclass(frozen=True)
class Run:
    """A config as it was measured and as it was planned right before."""

    seconds: float
    memory: int
    plan: Estimate
    steady: bool
    """The machine kept the pace that it was calibrated at."""


def runs_of(kind: tuple[int, tuple[int, int, int]], names: list[str], folder: Path) -> Iterator[tuple[str, Run]]:
    """Cases of a width and a number of ranks, behind a calibration for these. A run that ends when the machine has no
    longer the pace of its calibration is thrown away, and it and the rest begin with another calibration; but not
    more than `CALIBRATIONS` times, after which such runs count too and are marked."""
    left = list(names)
    for attempt in range(CALIBRATIONS):
        moment = Moment()
        machine = load_machine(str(calibrate(folder, *kind)))
        last = attempt == CALIBRATIONS - 1
        steady = moment.lasts()
        while left and (steady or last):
            seconds, taken = train(CASES[left[0]], folder / f"{left[0]} {attempt}")
            steady = moment.lasts()
            if steady or last:
                name = left.pop(0)
                yield name, Run(seconds, taken, plan_of(CASES[name], machine), steady)
        if not left:
            return
        print(f"the machine has another pace than when {kind[0]} x {kind[1][0]} was calibrated: anew", flush=True)


def compare(names: list[str], passes: int) -> Iterator[dict[str, Any]]:
    """Each case measured and planned, once a pass. In each pass the machine is calibrated anew for each width and
    number of ranks, and the cases that have these are trained at once behind it."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for _ in range(passes):
        with tempfile.TemporaryDirectory() as scratch:
            for kind in dict.fromkeys(CASES[name].kind for name in names):
                of_kind = [name for name in names if CASES[name].kind == kind]
                for name, run in runs_of(kind, of_kind, Path(scratch)):
                    runs[name].append(run)
                    moved = "" if run.steady else ", while the machine's pace moved"
                    print(f"{name}: {run.seconds:.3f} s, planned {run.plan.seconds:.3f}{moved}", flush=True)
    for name in names:
        yield row_of(name, runs[name])


def row_of(name: str, runs: list[Run]) -> dict[str, Any]:
    """Medians of a case's runs, and how far off the plan is."""
    case, measured = CASES[name], median(run.seconds for run in runs)
    planned, memory = median(run.plan.seconds for run in runs), max(run.memory for run in runs)
    of_process = runs[0].plan.memory[0]
    return {
        "name": name,
        "ranks": case.ranks,
        "seconds": round(measured, 4),
        "runs": [round(run.seconds, 4) for run in runs],
        "steady": [run.steady for run in runs],
        "planned": round(planned, 4),
        "plans": [round(run.plan.seconds, 4) for run in runs],
        "off": round(planned / measured - 1, 4),
        "memory": memory,
        "planned_memory": of_process,
        "memory_off": round(of_process / memory - 1, 4),
        "parts": {part: round(seconds, 4) for part, seconds in runs[-1].plan.parts.items()},
    }


def misordered(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Configs on as many ranks of which the first is slower by more than `APART`, and not planned to be."""
    return [
        (slow["name"], quick["name"])
        for slow, quick in permutations(rows, 2)
        if slow["ranks"] == quick["ranks"]
        and slow["seconds"] > (1 + APART) * quick["seconds"]
        and slow["planned"] <= quick["planned"]
    ]


def plan_of(case: Case, machine: Machine) -> Estimate:
    """What is said of a case before it runs."""
    config = load_config(CONFIG, case.overrides)
    return estimate(config, default_world_size(config), machine, vocab_size=VOCAB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=names_of(CASES), default=list(CASES), help="which of the configs")
    parser.add_argument("--passes", type=count, default=1, help="calibrations, and runs of each config")
    parser.add_argument("--out", type=out_file, help="a JSON file to write")
    arguments = parser.parse_args()
    rows = list(compare(arguments.only, arguments.passes))
    for row in rows:
        figures = f"{row['seconds']:.3f} | {row['planned']:.3f} | {100 * row['off']:+.0f} %"
        memory = (
            f"{row['memory'] / 2**20:,.0f} | {row['planned_memory'] / 2**20:,.0f} | {100 * row['memory_off']:+.0f} %"
        )
        print(f"| {row['ranks']} | {row['name']} | {figures} | {memory} |")
    moved = sum(run is False for row in rows for run in row["steady"])
    print(f"{sum(len(row['steady']) for row in rows)} runs, {moved} of them in another pace than was calibrated at")
    for what in ("off", "memory_off"):
        off = [abs(row[what]) for row in rows]
        words = "seconds" if what == "off" else "memory of processes"
        print(f"{len(off)} configs, {words}: median {100 * median(off):.1f} %, the worst {100 * max(off):.1f} %")
    pairs = misordered(rows)
    print(f"{len(pairs)} pairs more than {100 * APART:.0f} % apart are planned in another order")
    for slow, quick in pairs:
        print(f"{slow} took longer than {quick}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
