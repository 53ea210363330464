"""A cluster profile from what Slurm says of itself: `megalite launch --cluster auto`."""

from __future__ import annotations

import re
from collections import Counter

from megalite.errors import UserError
from megalite.slurm.cluster import ClusterConfig
from megalite.slurm_commands import ask, insist

FORMAT = "%P|%a|%l|%c|%G|%D"
"""sinfo's fields: partition, up or down, time limit, cores, generic resources, nodes."""

LONGEST_LIMIT = "24:00:00"
"""Asked for where a partition sets no limit: a job that ends sooner is started sooner, and the chain goes on."""


def detect_cluster(partition: str | None = None) -> ClusterConfig:
    """Fill in a profile for a partition, the cluster's default one if none is named.

    Raises:
        UnavailableError: there is no Slurm here.
        UserError: there is no such partition, or no default one.
    """
    lines = insist(lambda: ask(["sinfo", "--noheader", f"--format={FORMAT}"]), print).splitlines()
    return profile_from(lines, partition)


def profile_from(lines: list[str], partition: str | None) -> ClusterConfig:
    """A profile from sinfo's lines; where nodes of a partition differ, the most frequent kind counts."""
    kinds: Counter[tuple[str, int, int]] = Counter()
    names = {}
    for line in lines:
        name, up, limit, cores, resources, count = (part.strip() for part in line.split("|"))
        names[name.rstrip("*")] = name.endswith("*")
        wanted = name.rstrip("*") == partition if partition else name.endswith("*")
        if wanted and up == "up":
            kinds[limit, int(cores.rstrip("+")), _num_gpus(resources)] += int(count)
    if not kinds:
        wanted = f"partition {partition!r}" if partition else "a default partition"
        raise UserError(f"sinfo shows no {wanted} that is up; there are {', '.join(names) or 'none'}; name one of them")
    (limit, cores, gpus), _ = kinds.most_common(1)[0]
    chosen = partition or next(name for name, is_default in names.items() if is_default)
    return ClusterConfig(
        name="auto",
        partition=chosen,
        gpus_per_node=gpus,
        cpus_per_rank=max(1, cores // gpus) if gpus else None,
        time_limit=LONGEST_LIMIT if limit == "infinite" else limit,
    )


def _num_gpus(resources: str) -> int:
    """GPUs in sinfo's generic resources: `gpu:a100:4(S:0-1)`, `gpu:2`, `(null)`."""
    return sum(int(count) for count in re.findall(r"gpu(?::[a-zA-Z][\w.-]*)?:(\d+)", resources))
