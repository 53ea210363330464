"""How often `health.spikes` would have left a step out: a replay of the rule over runs that went without it.

    python tools/benchmarks/spikes.py runs/*/metrics.jsonl [--sigma 6 --sigma 12] [--window 128]

A run that was never in trouble should have no spike, so every step named is a false alarm. What a step left out would
have changed in the steps behind it is not replayed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from arguments import amount, count, existing

from megalite.config.sections.health import SpikesConfig
from megalite.train.spike_detector import SpikeDetector


def replay(metrics: Path, settings: SpikesConfig) -> Iterator[tuple[int, str]]:
    """The steps of a run that are spikes, and why."""
    watch = SpikeDetector(settings, {})
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["skipped"] or record["loss"] is None:
            continue
        why = watch.why_spike(record["loss"], record["grad_norm"])
        watch.note(record["step"], record["loss"], record["grad_norm"], is_spike=bool(why))
        if why:
            yield record["step"], why


def main() -> None:
    """Count, for each threshold; say which for the last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", type=existing, nargs="+")
    parser.add_argument("--sigma", type=amount, action="append")
    parser.add_argument("--window", type=count, default=SpikesConfig().window)
    options = parser.parse_args()
    num_steps = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in options.metrics)
    print(f"{len(options.metrics)} runs, {num_steps} steps, a window of {options.window}")
    for sigma in options.sigma or [SpikesConfig().sigma]:
        found = [
            (path, step, why)
            for path in options.metrics
            for step, why in replay(path, SpikesConfig(sigma=sigma, window=options.window))
        ]
        by_loss = sum(why.startswith("loss") for _, _, why in found)
        print(f"sigma {sigma:g}: {len(found)} spikes, {by_loss} of them by the loss")
    for path, step, why in found:
        print(f"  {path} step {step}: {why}")


if __name__ == "__main__":
    main()
