"""What few bits between replicas cost in loss: a small model on two data-parallel ranks, by what travels rounded.

    python tools/benchmarks/wire_loss.py [--steps 300] [--cases exact,int8,int4,weights,int8-weights,int4-weights]
                                         [--seeds 1,2] [--width 256] [--dir FOLDER]

Prepares the demo's data below the folder if they are not there, and runs `megalite train configs/debug.yaml` in fp32
with ZeRO-1 on two ranks at a hidden size, once for each case and seed; of one seed all cases start from the same
weights and see the same data. Finished runs are kept, so an interrupted call goes on. Prints, for each case, the mean
loss of the last steps and the validation loss, how far both are from the exact run's of the same seed, and the exact
losses of each seed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from arguments import count, listed, names_of, new_folder
from fp8_loss import TAIL_STEPS, lines, megalite

CASES: dict[str, tuple[str, ...]] = {
    "exact": (),
    "int8": ("precision.reduce_bits=8",),
    "int4": ("precision.reduce_bits=4",),
    "weights": ("precision.gather_bits=8",),
    "int8-weights": ("precision.reduce_bits=8", "precision.gather_bits=8"),
    "int4-weights": ("precision.reduce_bits=4", "precision.gather_bits=8"),
}
EXACT = "exact"


def train(folder: Path, case: str, steps: int, seed: int, width: int) -> tuple[float, float]:
    """Train one case, unless it is there already; the mean loss of its last steps, and its validation loss."""
    run, packed = folder / f"{case}-{width}-{steps}-{seed}", folder / "demo" / "packed"
    if not any(event["event"] == "done" for event in lines(run / "events.jsonl")):
        megalite(
            "train",
            "configs/debug.yaml",
            f"run.dir={run}",
            f"run.seed={seed}",
            f"data.train=[{{path: {packed / 'train'}}}]",
            f"data.valid=[{{path: {packed / 'valid'}}}]",
            f"model.hidden_size={width}",
            f"model.ffn_hidden_size={3 * width}",
            "parallel.dp=2",
            f"train.steps={steps}",
            f"train.eval_every={steps}",
            "train.eval_batches=16",
            "train.device=cpu",
            "checkpoint.every=null",
            "monitor.tensorboard=false",
            *CASES[case],
        )
    tail = [record["loss"] for record in lines(run / "metrics.jsonl")][-TAIL_STEPS:]
    valid = [event["loss"] for event in lines(run / "events.jsonl") if event["event"] == "validation"][-1]
    return statistics.mean(tail), valid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--cases", type=names_of(CASES), default=list(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--seeds", type=listed(count), default=[1, 2])
    parser.add_argument("--width", type=count, default=256, help="hidden size")
    parser.add_argument("--dir", type=new_folder, default=Path("runs/wire-loss"))
    arguments = parser.parse_args()
    folder, steps, seeds = arguments.dir.resolve(), arguments.steps, arguments.seeds
    if not (folder / "demo" / "packed" / "train").is_dir():
        megalite("data", "prepare", "configs/data/demo.yaml", f"out={folder / 'demo'}")
    width = arguments.width
    print(f"{time.strftime('%Y-%m-%d')}, dp 2, width {width}, {steps} steps, loss of the last {TAIL_STEPS} steps\n")
    print("| travels rounded | loss | from exact, by seed | validation | from exact, by seed |")
    print("|---|--:|---|--:|---|", flush=True)
    truth = [train(folder, EXACT, steps, seed, width) for seed in seeds]
    for case in arguments.cases:
        found = [train(folder, case, steps, seed, width) for seed in seeds]
        cells = [case]
        for kind in (0, 1):
            offs = [f"{run[kind] - exact[kind]:+.4f}" for run, exact in zip(found, truth, strict=True)]
            cells += [f"{statistics.mean(run[kind] for run in found):.4f}", "" if case == EXACT else ", ".join(offs)]
        print(f"| {' | '.join(cells)} |", flush=True)
    for kind, name in enumerate(("loss", "validation")):
        each = [exact[kind] for exact in truth]
        print(f"exact {name} by seed: {', '.join(f'{loss:.4f}' for loss in each)}")


if __name__ == "__main__":
    main()
