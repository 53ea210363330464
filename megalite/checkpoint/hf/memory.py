"""Whether the proof of a conversion fits into memory, asked before anything is written.

Converting takes next to none; running the model to compare its logits takes all of its weights, in one process after
the other. A job is limited by its control group long before the machine is full, so both are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megalite.checkpoint.hf.probes import make_probes
from megalite.config.plan import count_parameters
from megalite.config.schema import ModelConfig
from megalite.errors import ConversionError

BYTES_PER_PARAMETER = 6
"""fp32, and half of that again for the files mapped into memory and activations."""

BYTES_PER_LOGIT = 4

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
"""Names of the limit, of what is used, and of the page cache in it, which is given back when it is needed."""


def require_memory(model: ModelConfig, num_blocks: int | None = None) -> None:
    """Refuse, before anything is written, what would end in the kernel's killing one of the two processes.

    Args:
        model: filled.
        num_blocks: as for `verify`.

    Raises:
        ConversionError: with the number of blocks that would fit.
    """
    wanted = min(num_blocks or model.num_layers, model.num_layers)
    fitting = _num_fitting(model)
    if wanted > fitting:
        raise _too_little(model, wanted, f", or run only the first blocks: --verify-blocks {fitting}" * (fitting > 0))


def fitting_blocks(model: ModelConfig) -> int:
    """How many of a filled model's blocks can be run to compare logits; all of them where they fit.

    Raises:
        ConversionError: not even one.
    """
    fitting = _num_fitting(model)
    if fitting < 1:
        raise _too_little(model, 1, "")
    return min(fitting, model.num_layers)


def _num_fitting(model: ModelConfig) -> int:
    with_one, with_two = (_bytes_to_run(model, number) for number in (1, 2))
    return max(0, (available_bytes() - with_one) // (with_two - with_one) + 1)


def _too_little(model: ModelConfig, num_blocks: int, advice: str) -> ConversionError:
    blocks = "the model" if num_blocks == model.num_layers else f"{num_blocks} block{'s' * (num_blocks > 1)} of it"
    return ConversionError(
        f"running {blocks} to compare logits takes about {_bytes_to_run(model, num_blocks) / 1e9:.1f} GB of memory, "
        f"and {available_bytes() / 1e9:.1f} GB are available; use a machine with more{advice}"
    )


def available_bytes() -> int:
    """Memory that Linux would give this process without swapping."""
    lines = (PROC / "meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min([free, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """What is left of each limit on a control group that holds this process."""
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, names = (CGROUPS / "memory", VERSION_1) if controllers else (CGROUPS, VERSION_2)
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    yield from _left(folder, *names)


def _left(group: Path, limit_name: str, used_name: str, cache_names: tuple[str, ...]) -> Iterator[int]:
    """What is left in one group; nothing when it has no limit or is none of ours to see."""
    try:
        limit, used = ((group / name).read_text().strip() for name in (limit_name, used_name))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    if limit != "max":
        yield int(limit) - int(used) + sum(int(stat.get(name, 0)) for name in cache_names)


def _bytes_to_run(model: ModelConfig, num_blocks: int) -> int:
    """Memory that either process takes: the weights of some blocks, and all logits."""
    num_parameters = count_parameters(model.model_copy(update={"num_layers": num_blocks}))
    num_logits = model.vocab_size * sum(len(probe.tokens) for probe in make_probes(model))
    return num_parameters * BYTES_PER_PARAMETER + num_logits * BYTES_PER_LOGIT
