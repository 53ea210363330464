"""What integers cost in loss: the demo's model trained plainly, with weights of 8 and 4 bits, and rounded afterwards.

    python tools/benchmarks/qat_loss.py [--steps 300] [--cases fp32,int8,int4-32,int4-128,int4-row] [--lr 5e-4]
                                        [--dir FOLDER]

Prepares the demo's data below the folder if they are not there, and runs `megalite train configs/demo.yaml` in fp32 on
one rank, once for each case, from the same start; finished runs are kept, so an interrupted call goes on. Then it takes
the plain run's weights, rounds them as each case does and measures their validation loss: what training with the
rounding gains over rounding what was trained without. Prints a table.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from arguments import amount, count, names_of, new_folder
from fp8_loss import TAIL_STEPS, lines, megalite

CASES = {
    "fp32": "null",
    "int8": "{bits: 8, group_size: 128}",
    "int4-32": "{bits: 4, group_size: 32}",
    "int4-128": "{bits: 4, group_size: 128}",
    "int4-row": "{bits: 4, group_size: null}",
}
PLAIN = "fp32"
NO_RATE = 1e-12
"""At which a step changes nothing that a loss shows."""


def train(folder: Path, case: str, steps: int, lr: float) -> tuple[float, float]:
    """Train one case, unless it is there already; the mean loss of its last steps, and its validation loss."""
    run = folder / f"{case}-{steps}-{lr:g}"
    _run(folder, run, CASES[case], steps, lr)
    tail = [record["loss"] for record in lines(run / "metrics.jsonl")][-TAIL_STEPS:]
    return sum(tail) / len(tail), _validation(run)


def rounded_afterwards(folder: Path, case: str, steps: int, lr: float) -> float:
    """The validation loss of the plain run's weights, rounded."""
    run = folder / f"{case}-afterwards-{steps}-{lr:g}"
    _run(folder, run, CASES[case], 1, NO_RATE, f"train.init_from={folder / f'{PLAIN}-{steps}-{lr:g}'}")
    return _validation(run)


def _run(folder: Path, run: Path, qat: str, steps: int, lr: float, *others: str) -> None:
    if any(event["event"] == "done" for event in lines(run / "events.jsonl")):
        return
    packed = folder / "demo" / "packed"
    megalite(
        "train",
        "configs/demo.yaml",
        f"run.dir={run}",
        f"data.train=[{{path: {packed / 'train'}}}]",
        f"data.valid=[{{path: {packed / 'valid'}}}]",
        "model.ffn_hidden_size=768",
        "precision.dtype=fp32",
        f"precision.qat={qat}",
        f"train.steps={steps}",
        f"train.eval_every={steps}",
        f"schedule.warmup_steps={min(20, steps // 2)}",
        f"optimizer.lr={lr}",
        f"schedule.min_lr={lr / 10}",
        "train.device=cpu",
        "monitor.tensorboard=false",
        "parallel.tp=1",
        *others,
    )


def _validation(run: Path) -> float:
    return [event["loss"] for event in lines(run / "events.jsonl") if event["event"] == "validation"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--cases", type=names_of(CASES), default=list(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--lr", type=amount, default=5e-4, help="peak learning rate")
    parser.add_argument("--dir", type=new_folder, default=Path("runs/qat-loss"))
    arguments = parser.parse_args()
    folder, steps, lr = arguments.dir.resolve(), arguments.steps, arguments.lr
    if not (folder / "demo" / "packed" / "train").is_dir():
        megalite("data", "prepare", "configs/data/demo.yaml", f"out={folder / 'demo'}")
    print(f"{time.strftime('%Y-%m-%d')}, {steps} steps at rate {lr:g}, loss of the last {TAIL_STEPS} steps\n")
    print("| weights | loss | validation | from fp32 | rounded after training in fp32 | from fp32 |")
    print("|---|---|---|---|---|---|", flush=True)
    _, truth = train(folder, PLAIN, steps, lr)
    for case in arguments.cases:
        loss, valid = train(folder, case, steps, lr)
        cells = [case, f"{loss:.4f}", f"{valid:.4f}", f"{valid - truth:+.4f}", "", ""]
        if case != PLAIN:
            after = rounded_afterwards(folder, case, steps, lr)
            cells[4:] = [f"{after:.4f}", f"{after - truth:+.4f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
