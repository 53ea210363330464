"""What this machine lets a process have: memory, cores, streams, and whether the kernel has killed for memory.

A job is limited by its control group long before the machine is full, so both are asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
"""Names of the limit, of what is used, and of the page cache in it, which is given back when it is needed."""

KILLS = {"memory": "memory.oom_control", "": "memory.events"}
"""Where a control group counts the processes that were killed for its limit, by version 1's controller and for 2."""


BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Names of what multiplies bf16, on x86 and on ARM."""


@dataclass(frozen=True)
class CpuClass:
    """CPUs that compute alike, by what Linux says of them: a machine may hide units that its chip has."""

    name: str
    vendor: str
    family: str
    has: str
    """A unit that it must have."""
    lacks: str = ""
    """One that it must not have; empty for none."""


CPU_CLASSES = (
    CpuClass("zen3", "AuthenticAMD", "25", has="avx2", lacks="avx512f"),
    CpuClass("zen4", "AuthenticAMD", "25", has="avx512_bf16"),
    CpuClass("zen5", "AuthenticAMD", "26", has="avx512_bf16", lacks="avx512_fp16"),
    CpuClass("xeon-amx", "GenuineIntel", "6", has="amx_bf16"),
)
"""Those that something has been measured on."""

WIDEST_UNITS = ("amx_bf16", "avx512f", "avx2", "sve", "asimd")
"""Of CPUs, the widest first."""


def cpu_flags() -> set[str]:
    """What the first processor can do, and `GenuineIntel` if Intel made it; nothing where Linux does not say."""
    facts = _first_processor()
    return {word for name in ("flags", "Features", "vendor_id") for word in facts.get(name, "").split()}


def cpu_class() -> str:
    """A name in `CPU_CLASSES`, or one of its own for CPUs that nothing has been measured on: `other`, and what Linux
    says of maker, family and widest units."""
    facts, flags = _first_processor(), cpu_flags()
    vendor = facts.get("vendor_id", facts.get("CPU implementer", "")).strip()
    family = facts.get("cpu family", facts.get("CPU part", "")).strip()
    for each in CPU_CLASSES:
        if (each.vendor, each.family) == (vendor, family) and each.has in flags and each.lacks not in flags:
            return each.name
    units = next((unit for unit in WIDEST_UNITS if unit in flags), "")
    return "-".join(filter(None, ("other", vendor, family, units)))


def _first_processor() -> dict[str, str]:
    """What Linux says of it, by name; nothing where it does not."""
    try:
        lines = (PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip(): said for name, said in pairs}


def num_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def available_bytes() -> int:
    """Memory that Linux would give this process without swapping."""
    left = [amount for group, controllers in _groups() for amount in _left(group, *_names(controllers))]
    return max(0, min([_meminfo("MemAvailable"), *left]))


def total_bytes() -> int:
    """Memory that this process could have if nobody else had any."""
    limits = [amount for group, controllers in _groups() for amount in _limit(group, _names(controllers)[0])]
    return min([_meminfo("MemTotal"), *limits])


def _meminfo(name: str) -> int:
    lines = (PROC / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_process_bytes() -> int:
    """The most memory that this program has held; `getrusage` counts what its process held before as another one."""
    lines = (PROC / "self" / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def num_killed_for_memory() -> int:
    """Processes that the kernel has killed for want of memory so far: on this machine, and in our control groups.

    Counts of another time are to be subtracted; where nothing is counted, it is 0.
    """
    files = [PROC / "vmstat", *(group / KILLS[controllers] for group, controllers in _groups())]
    return sum(_counted(path) for path in files)


def _counted(path: Path) -> int:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return sum(int(line[1]) for line in lines if line[0] == "oom_kill")
    except (OSError, ValueError, IndexError):
        return 0


def _groups() -> Iterator[tuple[Path, str]]:
    """The control groups around this process that may limit its memory, with the name of version 1's controller."""
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / "memory" if controllers else CGROUPS
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    yield folder, controllers


def _names(controllers: str) -> tuple[str, str, tuple[str, ...]]:
    return VERSION_1 if controllers else VERSION_2


def _limit(group: Path, limit_name: str) -> Iterator[int]:
    """The limit of one group; nothing when it has none or is none of ours to see."""
    with suppress(OSError, ValueError):
        yield int((group / limit_name).read_text())


def _left(group: Path, limit_name: str, used_name: str, cache_names: tuple[str, ...]) -> Iterator[int]:
    """What is left in one group; nothing when it has no limit or is none of ours to see."""
    with suppress(OSError, ValueError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / used_name).read_text()) - sum(int(stat.get(name, 0)) for name in cache_names)
        yield from (limit - used for limit in _limit(group, limit_name))


def open_missing_streams() -> None:
    """Let whatever a daemon has closed of stdin, stdout and stderr lead nowhere: a file that we open would else take
    its place, and be written to."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for good)
