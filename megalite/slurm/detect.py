"""A cluster profile from what Slurm says of itself: `megalite launch --cluster auto`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from megalite.errors import ConfigError, UserError
from megalite.slurm.cluster import ClusterConfig, seconds_of
from megalite.slurm_commands import ask, insist
from megalite.slurm_quoting import option

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
    return profile_from(_ask_sinfo(), partition)


def check_cluster(cluster: ClusterConfig, num_nodes: int) -> None:
    """Refuse a profile that asks for what the cluster does not have: its jobs would wait for ever.

    Args:
        cluster: the profile.
        num_nodes: of a job, spares included.

    Raises:
        UnavailableError: there is no Slurm here.
        ConfigError: with everything that does not fit.
    """
    problems = misfits(_ask_sinfo(), cluster, num_nodes)
    if problems:
        raise ConfigError(problems)


def misfits(lines: Sequence[str], cluster: ClusterConfig, num_nodes: int) -> list[str]:
    """What a profile asks for and sinfo's lines do not have."""
    rows = [[part.strip() for part in line.split("|")] for line in lines]
    asked = cluster.partition.split(",") if cluster.partition else [r[0][:-1] for r in rows if r[0].endswith("*")]
    known = list(dict.fromkeys(row[0].rstrip("*") for row in rows))
    unknown = [name for name in asked if name not in known]
    if unknown:
        return [f"partition: sinfo shows no {', '.join(unknown)}; there are {', '.join(known)}"]
    rows = [row for row in rows if row[0].rstrip("*") in asked and row[1] == "up"]
    if not rows:
        return [f"partition: {', '.join(asked) or 'no default partition'} is not up; there are {', '.join(known)}"]
    problems = []
    most = max(_num_gpus(row[4]) for row in rows)
    if cluster.gpus_per_node > most:
        problems.append(
            f"gpus_per_node: found {cluster.gpus_per_node}, and nodes of {', '.join(asked)} have at most {most}; set "
            f"it to {most}"
        )
    total = sum(int(row[5]) for row in rows)
    if num_nodes > total:
        problems.append(
            f"{num_nodes} nodes are needed, spares included, and {', '.join(asked)} has {total}; use a smaller dp, or "
            "fewer spares"
        )
    limits = [row[2] for row in rows]
    if "infinite" not in limits and seconds_of(cluster.time_limit) > max(map(seconds_of, limits)):
        longest = max(limits, key=seconds_of)
        problems.append(
            f"time_limit: found {cluster.time_limit}, and {', '.join(asked)} allows {longest}; set it to that"
        )
    return problems


def profile_from(lines: list[str], partition: str | None) -> ClusterConfig:
    """A profile from sinfo's lines; where nodes of a partition differ, the most frequent kind counts."""
    kinds: Counter[tuple[str, int, int]] = Counter()
    is_default = {}
    for line in lines:
        name, up, time_limit, num_cores, resources, count = (part.strip() for part in line.split("|"))
        is_default[name.rstrip("*")] = name.endswith("*")
        is_wanted = name.rstrip("*") == partition if partition else name.endswith("*")
        if is_wanted and up == "up":
            kinds[time_limit, int(num_cores.rstrip("+")), _num_gpus(resources)] += int(count)
    if not kinds:
        wanted = f"partition {partition!r}" if partition else "a default partition"
        raise UserError(
            f"sinfo shows no {wanted} that is up; there are {', '.join(is_default) or 'none'}; name one of them"
        )
    (limit, cores, gpus), _ = kinds.most_common(1)[0]
    chosen = partition or next(name for name, is_it in is_default.items() if is_it)
    return ClusterConfig(
        name="auto",
        partition=chosen,
        gpus_per_node=gpus,
        cpus_per_rank=max(1, cores // gpus) if gpus else None,
        time_limit=LONGEST_LIMIT if limit == "infinite" else limit,
    )


def _ask_sinfo() -> list[str]:
    return insist(lambda: ask(["sinfo", "--noheader", option("format", FORMAT)]), print).splitlines()


def _num_gpus(resources: str) -> int:
    """GPUs in sinfo's generic resources: `gpu:a100:4(S:0-1)`, `gpu:2`, `(null)`."""
    return sum(int(count) for count in re.findall(r"gpu(?::[a-zA-Z][\w.-]*)?:(\d+)", resources))
