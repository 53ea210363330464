"""What the planner's figures leave out, in sentences."""

from __future__ import annotations

from megalite.config.optimizers import RULES
from megalite.config.schema import Config
from megalite.optim.rules import all_rules
from megalite.planner.machines import Machine
from megalite.planner.offloaded import is_offloaded


def left_out_of_steps(config: Config, machine: Machine) -> list[str]:
    """Of a step's seconds and memory."""
    notes = []
    if config.batch.stages:
        notes.append(
            f"a step's seconds are those of sequences of {config.batch.seq_len:,} tokens, as before the first of "
            "batch.stages; memory is that of the longest"
        )
    if config.precision.is_emulated:
        notes.append("seconds are those of products in fp32: what emulation takes to round is not counted, and is more")
    if config.precision.qat is not None:
        notes.append("what rounding weights to few bits takes is not counted")
    if config.train.offload_activations and machine.host_link is None and machine.device_type != "cpu":
        notes.append("what offload_activations takes to the host and back is not counted: the machine has no host_link")
    if config.optimizer.offload and machine.device_type != "cpu":
        notes += _of_offloaded_optimizer(config, machine)
    return notes


def _of_offloaded_optimizer(config: Config, machine: Machine) -> list[str]:
    if not is_offloaded(config, machine):
        missing = " and no ".join(name for name in ("host_link", "host_bandwidth") if getattr(machine, name) is None)
        return [
            "what an offloaded optimizer takes, on the host and to the device and back, is not counted: the machine "
            f"has no {missing}"
        ]
    multiplying = [name for name in all_rules(config.optimizer) if RULES[name].multiplies]
    if not multiplying:
        return []
    return [
        f"products of an offloaded {' and '.join(multiplying)} are counted as if the device made them: the host is "
        "slower"
    ]


def left_out_of_run(config: Config) -> list[str]:
    """Of a whole run's hours, and what they have that a step's seconds have not."""
    others = {"train.eval_every": config.train.eval_every, "checkpoint.every": config.checkpoint.every}
    given = [name for name, every in others.items() if every is not None]
    notes = ["hours are those of all of batch.stages, each by itself"] if config.batch.stages else []
    if given:
        notes.append(f"hours are those of training steps: what {' and '.join(given)} add is not counted")
    return notes
