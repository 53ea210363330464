"""What settings of the training recipe add to a step: clipping, changes of gradients, loss terms, the noise scale.

    python tools/benchmarks/recipe_costs.py [--steps 6] [--out F.json]

The model and the batches of `monitoring.py`, on one thread. An engine with the setting and one without take turns;
counted is CPU time of the process, and given is the ratio of the medians. The reference has AdamW and clips the norm
of all gradients. Optimizers are in `optimizers.py`, looks into layers in `monitoring.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

import torch
from arguments import count, out_file
from monitoring import cpu_seconds, make_batch, make_config

from megalite.config.plan import make_plan
from megalite.config.schema import Config
from megalite.engine.build import build_engine
from megalite.engine.runtime import connect_processes, disconnect_processes
from megalite.model.initialize import FreshWeights
from megalite.parallel.axes import connect
from megalite.parallel.mesh import Mesh
from megalite.train.micro_gradients import MicroGradients

BF16 = {"precision": {"dtype": "bf16"}, "parallel": {"zero_stage": 3, "engine": "deepspeed"}}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "optimizer.clip.by=value": ({}, {"optimizer": {"clip": {"by": "value", "threshold": 0.01}}}),
    "optimizer.clip.by=parameter": ({}, {"optimizer": {"clip": {"by": "parameter", "threshold": 0.1}}}),
    "optimizer.clip.by=layer": ({}, {"optimizer": {"clip": {"by": "layer", "threshold": 0.3}}}),
    "optimizer.clip.by=unit": ({}, {"optimizer": {"clip": {"by": "unit", "threshold": 0.01}}}),
    "optimizer.centralize": ({}, {"optimizer": {"centralize": True}}),
    "optimizer.noise": ({}, {"optimizer": {"noise": 1e-4}}),
    "model.z_loss": ({}, {"model": {"z_loss": 1e-4}}),
    "model.qk_norm": ({}, {"model": {"qk_norm": True}}),
    "batch.noise_scale.every=1": ({}, {"batch": {"noise_scale": {"every": 1}}}),
    "precision.master_dtype=bf16": (BF16, {**BF16, "precision": {"dtype": "bf16", "master_dtype": "bf16"}}),
}
"""What the reference has, and what is compared with it."""


class Trainee:
    """An engine that trains on two micro-batches a step."""

    def __init__(self, sections: dict[str, Any]):
        base = make_config("off").model_dump()
        config = Config(**{**base, **{name: {**base[name], **values} for name, values in sections.items()}})
        plan, self._axes = make_plan(config, 1), connect(Mesh(), 0)
        source = FreshWeights(plan.model, 1)
        self.engine = build_engine(config, plan, self._axes, torch.device("cpu"), source)
        self._meter = MicroGradients(self.engine.stage, self._axes) if config.batch.noise_scale else None
        self._batches = [make_batch(0), make_batch(1)]

    def step(self) -> None:
        if self._meter is not None:
            self._meter.start()
        result = self.engine.train_step(self._batches, 1e-4)
        if self._meter is not None:
            self._meter.finish(self._batches, result)


def compare(reference: dict[str, Any], setting: dict[str, Any], num_steps: int) -> tuple[float, float]:
    """Median CPU seconds of a step without and with the setting."""
    both = [Trainee(sections) for sections in (reference, setting)]
    seconds: list[list[float]] = [[], []]
    for each in both * 2:
        each.step()  # allocates
    for _ in range(num_steps):
        for each, times in zip(both, seconds, strict=True):
            times.append(cpu_seconds(each.step))
    for each in both:
        each.engine.close()
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=6)
    parser.add_argument("--only", action="append", choices=CASES, help="this setting; may be given several times")
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        connect_processes(rank=0, world_size=1, device_type="cpu", init_method=f"file://{folder}/store")
        for name in options.only or CASES:
            without, with_it = compare(*CASES[name], options.steps)
            found[name] = {"without": without, "with": with_it}
            print(f"{with_it / without - 1:+8.2%} of {without * 1e3:7.0f} ms  {name}", flush=True)
        disconnect_processes()
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
