"""What FP8 costs in loss: the demo's model trained in bf16 and in emulated FP8, on each layout, from the same start.

    python tools/benchmarks/fp8_loss.py [--steps 300] [--layouts tp2,pp2] [--recipes bf16,current,block] [--lr 5e-4]
                                        [--dir FOLDER]

Prepares the demo's data below the folder if they are not there, runs `megalite train configs/demo.yaml` once for each
layout and recipe, one after the other (finished runs are kept, so an interrupted call goes on), and prints a table: the
mean loss of the last steps, the validation loss, and their distance from bf16 on the same layout. Exits with 1 when one
is 1 % or more away.

The rate is a quarter of the demo's. At the demo's own, chosen to show something within three hundred steps, the first
steps overshoot, and any other rounding of them leads to another run: `fp32` among the recipes shows how far.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from arguments import amount, count, names_of, new_folder

ROOT = Path(__file__).parents[2]

LAYOUTS = {
    "tp2": ["parallel.tp=2"],
    "pp2": ["parallel.tp=1", "parallel.pp=2"],
    "one": ["parallel.tp=1"],
}
RECIPES = ("bf16", "fp32", "current", "delayed", "rowwise", "block", "mxfp8")
PLAIN = ("bf16", "fp32")
ALLOWED = 0.01
"""Relative, of the loss."""
TAIL_STEPS = 20
"""Last steps whose mean loss is compared."""
RUN_TIMEOUT_SECONDS = 4 * 3600.0


def megalite(*arguments: str | Path) -> None:
    """Run a command; its output is shown only when it fails."""
    command = [sys.executable, "-m", "megalite", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_SECONDS, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def train(folder: Path, layout: str, recipe: str, steps: int, lr: float) -> dict[str, float]:
    """Train one case, unless it is there already; what came of it."""
    run = folder / f"{layout}-{recipe}-{steps}-{lr:g}"
    fp8 = "null" if recipe in PLAIN else f"{{backend: emulate, recipe: {recipe}, watch_every: {max(1, steps // 6)}}}"
    if not any(event["event"] == "done" for event in lines(run / "events.jsonl")):
        packed = folder / "demo" / "packed"
        megalite(
            "train",
            "configs/demo.yaml",
            f"run.dir={run}",
            f"data.train=[{{path: {packed / 'train'}}}]",
            f"data.valid=[{{path: {packed / 'valid'}}}]",
            f"precision.dtype={'fp32' if recipe == 'fp32' else 'bf16'}",
            f"precision.fp8={fp8}",
            f"train.steps={steps}",
            f"train.eval_every={steps}",
            f"schedule.warmup_steps={min(20, steps // 2)}",
            f"optimizer.lr={lr}",
            f"schedule.min_lr={lr / 10}",
            "train.device=cpu",
            "monitor.tensorboard=false",
            "checkpoint.every=null",
            *LAYOUTS[layout],
        )
    losses = [record["loss"] for record in lines(run / "metrics.jsonl")]
    valid = [event["loss"] for event in lines(run / "events.jsonl") if event["event"] == "validation"]
    tail = losses[-TAIL_STEPS:]
    looks = lines(run / "fp8.jsonl")
    worst = max((look["shadow"]["error"] for look in looks), default=0.0)
    return {"first": losses[0], "train": sum(tail) / len(tail), "valid": valid[-1], "shadow": worst}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--layouts", type=names_of(LAYOUTS), default=["tp2", "pp2"], help="of " + ", ".join(LAYOUTS))
    parser.add_argument(
        "--recipes", type=names_of(RECIPES), default=["bf16", "current", "block"], help="of " + ", ".join(RECIPES)
    )
    parser.add_argument("--lr", type=amount, default=5e-4, help="peak learning rate")
    parser.add_argument("--dir", type=new_folder, default=Path("runs/fp8-loss"))
    arguments = parser.parse_args()
    folder = arguments.dir.resolve()
    if not (folder / "demo" / "packed" / "train").is_dir():
        megalite("data", "prepare", "configs/data/demo.yaml", f"out={folder / 'demo'}")
    what = f"{arguments.steps} steps at rate {arguments.lr:g}, loss of the last {TAIL_STEPS} steps"
    print(f"{time.strftime('%Y-%m-%d')}, {what}\n")
    print("| layout | format | loss | from bf16 | validation | from bf16 | largest shadow error |")
    print("|---|---|---|---|---|---|---|", flush=True)
    too_far = False
    for layout in arguments.layouts:
        truth = train(folder, layout, "bf16", arguments.steps, arguments.lr)
        for recipe in arguments.recipes:
            found = train(folder, layout, recipe, arguments.steps, arguments.lr)
            gaps = [found[key] / truth[key] - 1 for key in ("train", "valid")]
            too_far |= any(abs(gap) >= ALLOWED for gap in gaps)
            cells = (layout, recipe, f"{found['train']:.4f}", f"{gaps[0]:+.2%}", f"{found['valid']:.4f}")
            print(f"| {' | '.join(cells)} | {gaps[1]:+.2%} | {found['shadow']:.1e} |", flush=True)
    sys.exit(1 if too_far else 0)


if __name__ == "__main__":
    main()
