"""How good the rates are that `megalite lr-find` suggests: against the best of a grid, on a dozen small runs.

    python tools/benchmarks/lr_find.py [--data data/demo/packed] [--steps 120] [--only NAME] --out F.json

For each case a short training is done at every rate of a grid, and the validation loss at its end noted; then the
finder sweeps from three seeds. A rule reads a rate off a sweep; its regret is the loss at that rate (between the grid's
rates by a straight line over the logarithm) less the lowest of the grid. All rules are judged on the same sweeps, which
are kept, so that a new rule needs no new training. The data: `megalite data prepare configs/data/demo.yaml`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import count, existing, out_file

from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.data.loader import Loader
from megalite.data.samples import Samples, open_samples, open_validation_samples
from megalite.engine.build import build_engine
from megalite.engine.protocol import Engine, NonFiniteLossError
from megalite.engine.runtime import connect_processes, disconnect_processes
from megalite.model.initialize import FreshWeights
from megalite.optim.schedules import learning_rate
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.studies.lr_finder import Found, Sweep, raise_rate

SEQ_LEN, VOCAB = 256, 4096
GRID = [1e-4 * 10 ** (third / 3) for third in range(10)]
"""1e-4 to 1e-1, three a decade."""
SEEDS = (1, 2, 3)
EVAL_BATCHES = 16

BASE: dict[str, Any] = {
    "model": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "ffn_hidden_size": 192,
        "vocab_size": VOCAB,
        "tie_embeddings": True,
    },
    "batch": {"micro_batch_size": 4, "global_batch_size": 4, "seq_len": SEQ_LEN},
    "parallel": {"zero_stage": 0},
    "precision": {"dtype": "fp32"},
    "schedule": {"name": "cosine", "warmup_steps": 10},
    "train": {"steps": 1, "compile": "off", "device": "cpu"},
}
CASES: dict[str, dict[str, Any]] = {
    "small": {},
    "wide": {"model": {"hidden_size": 128, "ffn_hidden_size": 384}},
    "deep": {"model": {"num_layers": 8}},
    "untied": {"model": {"tie_embeddings": False}},
    "like GPT-2": {"model": {"norm": "layernorm", "activation": "gelu", "bias": "all", "positions": "learned"}},
    "muP": {"model": {"mup": {"base_hidden_size": 32}}},
    "batch of 1": {"batch": {"micro_batch_size": 1, "global_batch_size": 1}},
    "batch of 16": {"batch": {"micro_batch_size": 4, "global_batch_size": 16}},
    "no warmup": {"schedule": {"warmup_steps": 0}},
    "constant rate": {"schedule": {"name": "constant"}},
    "Lion": {"optimizer": {"name": "lion"}},
    "Muon": {"optimizer": {"name": "muon"}},
}


def fall(share: float) -> Callable[[Found], float]:
    """The rate by which the smoothed loss has come a share of its way down."""
    return lambda found: found.rate_by(share)


RULES: dict[str, Callable[[Found], float]] = {
    "lowest / 10": lambda found: found.lowest / 10,
    "lowest / 3": lambda found: found.lowest / 3,
    "steepest": lambda found: found.steepest,
    "between steepest and lowest": lambda found: math.sqrt(found.steepest * found.lowest),
    **{f"{share:.0%} of the fall": fall(share) for share in (0.25, 0.5, 0.6, 0.7, 0.8, 0.9)},
    "suggested": lambda found: found.suggestion,
}


class Case:
    """One kind of run."""

    def __init__(self, sections: dict[str, Any], data: Path, num_steps: int):
        merged = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}}
        merged["train"] = {**merged["train"], "steps": num_steps}
        self.config, self._data = Config(**merged), data
        self.plan: RunPlan = make_plan(self.config, 1)
        self._axes = connect(Mesh(), 0)

    def engine(self, seed: int) -> Engine:
        return build_engine(
            self.config, self.plan, self._axes, torch.device("cpu"), FreshWeights(self.plan.model, seed)
        )

    def batches(self, seed: int) -> Iterator[list]:
        samples = open_samples(_sources(self._data / "train"), seq_len=SEQ_LEN, seed=seed, document_masks=True)
        yield from self._read(samples, 10**6)

    def train(self, rate: float) -> float:
        """The validation loss at the end of a run; infinite for one that blew up."""
        engine, optimizer = self.engine(SEEDS[0]), self.config.optimizer.model_copy(update={"lr": rate})
        batches, total = self.batches(SEEDS[0]), self.plan.total_steps
        try:
            for step in range(1, total + 1):
                engine.train_step(next(batches), learning_rate(step, total, optimizer, self.plan.schedule))
            return self._validate(engine)
        except NonFiniteLossError:
            return math.inf
        finally:
            engine.close()

    def sweep(self, seed: int) -> Found:
        engine = self.engine(seed)
        rates, losses = raise_rate(engine, self.batches(seed), Sweep(), self._axes, torch.device("cpu"))
        engine.close()
        return Found(rates, losses, f"seed {seed}")

    def _validate(self, engine: Engine) -> float:
        samples = open_validation_samples(_sources(self._data / "valid"), seq_len=SEQ_LEN, document_masks=True)
        sums = [engine.eval_step(batches) for batches in self._read(samples, EVAL_BATCHES)]
        return sum(loss for loss, _ in sums) / sum(count for _, count in sums)

    def _read(self, samples: Samples, num_steps: int) -> Iterator[list]:
        loader = Loader.for_run(samples, self.config, self.plan.batch_sizes, dp_size=1, dp_rank=0)
        try:
            for _, batches in loader.steps(1, num_steps):
                yield batches
        finally:
            loader.close()


def _sources(path: Path) -> list:
    return list(Config(data={"train": [{"path": str(path)}]}).data.train)


def loss_at(rate: float, grid: list[float]) -> float:
    """Between the grid's rates by a straight line over their logarithm; beyond its ends as at them."""
    finite = [value if math.isfinite(value) else 20.0 for value in grid]
    return float(np.interp(math.log(rate), np.log(GRID), finite))


def judge(found: dict[str, Any]) -> None:
    """Print every rule's regret in every case: the mean over the seeds, and the widest spread of its rates."""
    print(f"\n{'case':16}{'best rate':>10}{'loss':>8}" + "".join(f"{name[:13]:>14}" for name in RULES))
    regrets: dict[str, list[float]] = {name: [] for name in RULES}
    for case, record in found.items():
        best = min(range(len(GRID)), key=record["grid"].__getitem__)
        row = f"{case:16}{GRID[best]:10.1e}{record['grid'][best]:8.3f}"
        for name, rule in RULES.items():
            rates = [rule(Found(**sweep)) for sweep in record["sweeps"]]
            each = [loss_at(rate, record["grid"]) - record["grid"][best] for rate in rates]
            regrets[name] += each
            row += f"{statistics.fmean(each):7.3f}{statistics.median(rates):7.0e}"
        print(row)
    print(f"{'mean':34}" + "".join(f"{statistics.fmean(each):7.3f}{'':7}" for each in regrets.values()))
    print(f"{'worst':34}" + "".join(f"{max(each):7.3f}{'':7}" for each in regrets.values()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=existing, default="data/demo/packed")
    parser.add_argument("--steps", type=count, default=120)
    parser.add_argument("--only", action="append", choices=CASES)
    parser.add_argument("--out", type=out_file, required=True, help="read too: what it has is not done again")
    options = parser.parse_args()
    try:
        found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    except ValueError as error:
        parser.error(f"--out: {options.out} is there and no file of runs ({error}); use another file")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        connect_processes(rank=0, world_size=1, device_type="cpu", init_method=f"file://{folder}/store")
        for name in options.only or CASES:
            if name in found:
                continue
            case = Case(CASES[name], options.data, options.steps)
            grid = [case.train(rate) for rate in GRID]
            sweeps = [vars(case.sweep(seed)) for seed in SEEDS]
            found[name] = {"grid": grid, "sweeps": sweeps}
            print(f"{name}: {' '.join(f'{loss:.3f}' for loss in grid)}", flush=True)
            options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
        disconnect_processes()
    judge(found)


if __name__ == "__main__":
    main()
