"""Loss at equal tokens, seconds a step and bytes of state of every optimizer, on the demo's model and corpus.

    megalite data prepare configs/data/demo.yaml
    python tools/benchmarks/optimizers.py [section.key=value ...] [--steps 300] [--out FILE.json]

Every optimizer trains the model of configs/demo.yaml from the same weights on the same batches, on one rank without
ZeRO, at several learning rates, and the best counts: rates that suit AdamW say nothing of SGD. While the best rate is
the lowest or highest that was tried, half or twice of it is tried too. Runs that FILE has are not done again, so a
broken sweep goes on. Seconds a step are medians, and are given against AdamW's: for those the machine must be quiet,
and `--steps 40 --middle` is enough. Overrides hold for all runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import count, out_file

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "demo.yaml"

VOCAB = "4096"
"""Of the demo's tokenizer."""

CASES: dict[str, tuple[list[str], tuple[float, ...]]] = {
    "adamw": ([], (1e-3, 2e-3, 4e-3)),
    "muon": ([], (1e-3, 2e-3, 4e-3)),
    "soap": ([], (1e-3, 2e-3, 4e-3)),
    "adamw8bit": ([], (1e-3, 2e-3, 4e-3)),
    "lion": (["optimizer.betas=[0.9, 0.99]", "optimizer.weight_decay=0.3"], (2e-4, 4e-4, 8e-4)),
    "muon8bit": ([], (1e-3, 2e-3, 4e-3)),
    "lion8bit": (["optimizer.betas=[0.9, 0.99]", "optimizer.weight_decay=0.3"], (2e-4, 4e-4, 8e-4)),
    "adafactor": (["optimizer.clip_grad_norm=null"], (1e-3, 2e-3, 4e-3)),
    "sgd": (["optimizer.momentum=0.9"], (0.1, 0.3, 1.0)),
}
"""Settings and first learning rates by optimizer, the likeliest in the middle."""

MOST_RATES = 8
"""Tried of an optimizer at most."""

LAST_STEPS = 20
"""Of which the mean training loss is given."""

WARM_STEPS = 10
"""Left out of the times."""


def train(name: str, lr: float, steps: int, overrides: list[str]) -> dict[str, Any]:
    """One run; its losses and seconds a step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}/run",
            "parallel.tp=1",
            "parallel.zero_stage=0",
            f"optimizer.name={name}",
            f"optimizer.lr={lr}",
            f"schedule.min_lr={lr / 10}",
            f"train.steps={steps}",
            f"train.eval_every={steps}",
            "checkpoint.every=null",
            *CASES[name][0],
            *overrides,
        ]
        command = [sys.executable, "-m", "megalite", "train", str(CONFIG), *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
        records = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return {
        "lr": lr,
        "loss": statistics.mean(record["loss"] for record in records[-LAST_STEPS:]),
        "tokens": records[-1]["tokens"],
        "seconds": statistics.median(record["seconds"] for record in records[WARM_STEPS:]),
        "memory_bytes": max(record["memory_bytes"] for record in records),
    }


def next_rate(rates: tuple[float, ...], tried: list[dict[str, Any]]) -> float | None:
    """The rate to try next: one of the first, or one beyond the best while that is at an end; None when it is found."""
    done = sorted(run["lr"] for run in tried)
    left = [rate for rate in rates if rate not in done]
    if left:
        return left[0]
    best = min(tried, key=lambda run: run["loss"])["lr"]
    if len(rates) == 1 or len(done) >= MOST_RATES or done[0] < best < done[-1]:
        return None
    return best / 2 if best == done[0] else best * 2


def sweep(name: str, rates: tuple[float, ...], runs: dict[str, Any], arguments: argparse.Namespace) -> None:
    """All runs of an optimizer, those that `runs` has left out; each is written down as soon as it has ended."""
    tried = runs.get(name, {}).get("tried", [])
    while (rate := next_rate(rates, tried)) is not None:
        tried.append(train(name, rate, arguments.steps, arguments.overrides))
        best = min(tried, key=lambda run: run["loss"])
        runs[name] = {**best, "state_bytes": state_bytes(name, arguments.overrides), "tried": tried}
        if arguments.out:
            arguments.out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def state_bytes(name: str, overrides: list[str]) -> float:
    """Bytes of optimizer state a parameter, as `config check` says."""
    command = [sys.executable, "-m", "megalite", "config", "check", str(CONFIG), "--vocab-size", VOCAB, "--json"]
    settings = [f"optimizer.name={name}", *CASES[name][0], *overrides]
    done = subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["optimizer_bytes_per_parameter"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="settings of all runs")
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--middle", action="store_true", help="of the first rates, only the middle one")
    parser.add_argument("--only", action="append", choices=CASES, help="this optimizer; may be given several times")
    parser.add_argument("--out", type=out_file, help="JSON of all runs; goes on with those it has")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_STEPS:
        parser.error(
            f"--steps: found {arguments.steps}, and the first {WARM_STEPS} are left out of the times; use more"
        )
    settings = {"steps": arguments.steps, "overrides": arguments.overrides}
    runs: dict[str, Any] = {"settings": settings}
    if arguments.out and arguments.out.exists():
        try:
            runs = json.loads(arguments.out.read_text(encoding="utf-8"))
        except ValueError as error:
            parser.error(f"--out: {arguments.out} is there and no file of runs ({error}); use another file")
        if (found := runs.get("settings")) != settings:
            parser.error(f"--out: {arguments.out} has runs of {found}, asked for are {settings}; use another file")
    names = arguments.only or list(CASES)
    for name in names:
        rates = CASES[name][1]
        sweep(name, rates[1:2] if arguments.middle else rates, runs, arguments)
        best = runs[name]
        if name == names[0]:
            print(f"{'':10} {'lr':>8} {'loss':>7} {'step':>6} {'bytes':>6}   (step against {name}'s)")
        ratio = best["seconds"] / runs[names[0]]["seconds"]
        print(
            f"{name:10} {best['lr']:8.1e} {best['loss']:7.4f} {ratio:6.2f} {runs[name]['state_bytes']:6.2f}", flush=True
        )


if __name__ == "__main__":
    main()
