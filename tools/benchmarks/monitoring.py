"""What watching a run costs: looks into the layers, comparisons of weights, the search for spikes.

    python tools/benchmarks/monitoring.py [--steps 8] [--compile on] [--out F.json]

One process trains workload W1 of `train_cpu.py` (hidden 384, 6 layers, sequences of 512) with a vocabulary of 8192, at
two micro-batches of two sequences a step. Plain steps and watched ones take turns; counted is CPU time of the process,
which a busy machine changes less than wall time, with one thread, since threads that wait for work spin. A comparison
of weights is its hashing, without the wait for the other ranks. The overhead of a setting is the extra work of a
watched step over the steps until the next one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from arguments import count, out_file

from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config
from megalite.config.sections.health import HealthConfig, SpikesConfig
from megalite.config.sections.monitor import MonitorConfig
from megalite.data.loader import Batch
from megalite.engine.build import build_engine
from megalite.engine.runtime import connect_processes, disconnect_processes
from megalite.model.initialize import FreshWeights
from megalite.monitor.layers import LayerStatistics
from megalite.parallel.axes import Axes, connect
from megalite.parallel.mesh import Mesh
from megalite.train.components.memory_check import MemoryCheck
from megalite.train.replicas import hash_tensor
from megalite.train.spike_detector import SpikeDetector

SEQ_LEN, MICRO_BATCH, VOCAB = 512, 2, 8192
LIMIT = 0.02
"""Of the work of a run, at the default settings."""


def make_config(compiled: str) -> Config:
    """Workload W1, with a look at every step that is told to be watched."""
    return Config(
        model={
            "hidden_size": 384,
            "num_layers": 6,
            "num_heads": 6,
            "ffn_hidden_size": 1024,
            "vocab_size": VOCAB,
            "tie_embeddings": True,
        },
        parallel={"zero_stage": 0},
        batch={"micro_batch_size": MICRO_BATCH, "global_batch_size": 2 * MICRO_BATCH, "seq_len": SEQ_LEN},
        precision={"dtype": "fp32"},
        train={"steps": 1000, "compile": compiled},
        monitor={"layers_every": 1},
    )


def make_batch(number: int) -> Batch:
    """Two sequences of random tokens, one document each."""
    generator = torch.Generator().manual_seed(number)
    num_tokens = MICRO_BATCH * SEQ_LEN
    tokens = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    place = torch.arange(num_tokens)
    borders = torch.arange(0, num_tokens + 1, SEQ_LEN, dtype=torch.int32)
    keys = number * num_tokens + place
    mask = torch.ones(num_tokens, dtype=torch.bool)
    return Batch(tokens, tokens.roll(-1), mask, place % SEQ_LEN, borders, SEQ_LEN, keys)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of the process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(config: Config, plan: RunPlan, axes: Axes, num_steps: int) -> dict[str, float]:
    """Median CPU seconds of a plain step, and of what each way of watching adds to one."""
    engine = build_engine(config, plan, axes, torch.device("cpu"), FreshWeights(plan.model, 1))
    layers = LayerStatistics(engine, plan.model, axes, config.batch.seq_len, config.monitor.attention_queries)
    batches = [make_batch(0), make_batch(1)]
    memory = MemoryCheck(engine, axes, recorder=None, every=1)
    spikes = SpikeDetector(SpikesConfig(), {})
    for step in range(1000):
        spikes.note(step, 2.0 + step % 7 / 100, 1.0, is_spike=False)

    def train() -> object:
        return engine.train_step(batches, 1e-4)

    kinds: dict[str, Callable[[], object]] = {
        "plain": train,
        "watched": lambda: (layers.begin(batches), layers.end(train())),
        "replicas": lambda: [hash_tensor(parameter) for parameter in engine.stage.parameters()],
        "memory": lambda: (
            memory.take_note(1),
            memory.rewind(1, {}),
        ),  # the first of two hashes; the second costs the same
        "spikes": lambda: (spikes.why_spike(2.0, 1.0), spikes.note(2000, 2.0, 1.0, is_spike=False), spikes.state()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for work in [*kinds.values()] * 2:
        work()  # compiles, allocates
    for _ in range(num_steps):
        for name, work in kinds.items():
            seconds[name].append(cpu_seconds(work))
    engine.close()
    medians = {name: median(values) for name, values in seconds.items()}
    return {**medians, "look": max(0.0, medians["watched"] - medians["plain"])}


def overheads(found: dict[str, float]) -> dict[str, float]:
    """Extra work over plain work, by setting."""
    step, every = found["plain"], MonitorConfig().layers_every
    assert every == HealthConfig().check_replicas_every == HealthConfig().check_memory_every
    looks_and_checks = found["look"] + found["replicas"] + 2 * found["memory"]
    return {
        "default": looks_and_checks / every / step,
        f"layers_every={every}": found["look"] / every / step,
        "layers_every=10": found["look"] / 10 / step,
        f"check_replicas_every={every}": found["replicas"] / every / step,
        f"check_memory_every={every}": 2 * found["memory"] / every / step,
        "spikes": found["spikes"] / step,
        "all, every 10 steps": (looks_and_checks / 10 + found["spikes"]) / step,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=8)
    parser.add_argument("--compile", choices=("off", "on"), default="off")
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        connect_processes(rank=0, world_size=1, device_type="cpu", init_method=f"file://{folder}/store")
        config = make_config(options.compile)
        plan = make_plan(config, 1)
        found = measure(config, plan, connect(Mesh(), 0), options.steps)
        disconnect_processes()
    for name in ("plain", "watched", "look", "replicas", "memory", "spikes"):
        print(f"{name:>10}: {found[name] * 1e3:9.2f} ms of CPU")
    ratios = overheads(found)
    for name, ratio in ratios.items():
        print(f"{ratio:8.3%}  {name}")
    default = next(iter(ratios.values()))
    print(f"the default costs {default:.2%} of the work, asked for is less than {LIMIT:.0%}")
    if options.out is not None:
        options.out.write_text(json.dumps({"seconds": found, "overheads": ratios}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
