"""What FP4 costs in loss: the demo's model trained in fp32 and in emulated NVFP4 and MXFP4, whole and in part.

    python tools/benchmarks/fp4_loss.py [--steps 200] [--cases fp32,nvfp4,...] [--lr 5e-4] [--dir FOLDER] [--json FILE]

Prepares the demo's data below the folder if they are not there, and runs `megalite train configs/demo.yaml` on one
rank, once for each case, from the same start; finished runs are kept, so an interrupted call goes on. A step has 512
tokens. Prints a table, and writes its numbers with the machine and versions to the file.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from arguments import amount, count, names_of, new_folder, out_file
from fp8_loss import TAIL_STEPS, lines, megalite

CASES = {
    "fp32": "null",
    "nvfp4": "{format: nvfp4}",
    "nvfp4-nearest": "{format: nvfp4, stochastic_rounding: none}",
    "nvfp4-untransformed": "{format: nvfp4, hadamard: none}",
    "nvfp4-all-blocks": "{format: nvfp4, keep_last_blocks: 0}",
    "nvfp4-bare": (
        "{format: nvfp4, stochastic_rounding: none, hadamard: none, keep_last_blocks: 0, square_weights: false}"
    ),
    "mxfp4": "{format: mxfp4}",
    "mxfp4-forward": "{format: mxfp4, forward: true}",
    "nvfp4-rows": "{format: nvfp4, square_weights: false}",
}
PLAIN = "fp32"
SEQUENCES, SEQ_LEN = 2, 256
"""Of a step: emulation takes three to five times a plain step."""


def train(folder: Path, case: str, steps: int, lr: float) -> dict[str, Any]:
    """Train one case, unless it is there already: the mean loss of its last steps, and its validation loss."""
    run = folder / f"{case}-{steps}-{lr:g}"
    if not any(event["event"] == "done" for event in lines(run / "events.jsonl")):
        _run(folder, run, CASES[case], steps, lr)
    records = lines(run / "metrics.jsonl")
    tail = [record["loss"] for record in records][-TAIL_STEPS:]
    valid = [event["loss"] for event in lines(run / "events.jsonl") if event["event"] == "validation"][-1]
    return {"case": case, "fp4": CASES[case], "loss": sum(tail) / len(tail), "validation": valid}


def _run(folder: Path, run: Path, fp4: str, steps: int, lr: float) -> None:
    packed = folder / "demo" / "packed"
    megalite(
        "train",
        "configs/demo.yaml",
        f"run.dir={run}",
        f"data.train=[{{path: {packed / 'train'}}}]",
        f"data.valid=[{{path: {packed / 'valid'}}}]",
        "precision.dtype=fp32",
        f"precision.fp4={fp4}",
        f"batch.micro_batch_size={SEQUENCES}",
        f"batch.global_batch_size={SEQUENCES}",
        f"batch.seq_len={SEQ_LEN}",
        f"train.steps={steps}",
        f"train.eval_every={steps}",
        f"schedule.warmup_steps={min(20, steps // 2)}",
        f"optimizer.lr={lr}",
        f"schedule.min_lr={lr / 10}",
        "train.device=cpu",
        "monitor.tensorboard=false",
        "checkpoint.every=null",
        "parallel.tp=1",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--cases", type=names_of(CASES), default=list(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--lr", type=amount, default=5e-4, help="peak learning rate")
    parser.add_argument("--dir", type=new_folder, default=Path("runs/fp4-loss"))
    parser.add_argument("--json", type=out_file, default=None, help="also write the numbers here")
    arguments = parser.parse_args()
    folder, steps, lr = arguments.dir.resolve(), arguments.steps, arguments.lr
    if not (folder / "demo" / "packed" / "train").is_dir():
        megalite("data", "prepare", "configs/data/demo.yaml", f"out={folder / 'demo'}")
    print(f"{time.strftime('%Y-%m-%d')}, {steps} steps at rate {lr:g}, loss of the last {TAIL_STEPS} steps\n")
    print("| case | loss | from fp32 | validation | from fp32 |")
    print("|---|---|---|---|---|", flush=True)
    truth, found = train(folder, PLAIN, steps, lr), list[dict[str, Any]]()
    for case in arguments.cases:
        found.append(train(folder, case, steps, lr))
        cells = [f"{found[-1][key]:.4f} | {found[-1][key] / truth[key] - 1:+.2%}" for key in ("loss", "validation")]
        print(f"| {case} | {' | '.join(cells)} |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_record(steps, lr, found), indent=1) + "\n", encoding="utf-8")


def _record(steps: int, lr: float, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": _cpu_name(),
        "ranks": 1,
        "torch": version("torch"),
        "steps": steps,
        "tokens_per_step": SEQUENCES * SEQ_LEN,
        "lr": lr,
        "tail_steps": TAIL_STEPS,
        "results": results,
    }


def _cpu_name() -> str:
    found = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in found if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
