"""What a corpus of any size would take on a cluster: a simulation of the stations' tasks, from measured rates.

    python tools/benchmarks/data_scale.py --tb 1,100 [--nodes 100] [--cores 64] [--disk-gbs 100] [--node-gbs 12.5] ...

    phase     tasks        a task reads                  computes             writes
    map       shards       its shard                     MB/s of one core     its part of every partition
    reduce    partitions   its part of every shard       MB/s of one core     what it found
    single    1            what all of them found        MB/s of one core     who stays of each cluster

`stations()` writes the phases of every station down as numbers of tasks and bytes, as the code of megalite/data cuts
them; `data_scale_simulation.py` runs them on a cluster, once without trouble and once with slow and failing nodes.
CPU seconds come from a file that `data_memory.py` wrote, bytes a document from the stations' own docstrings.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arguments import amount, count, existing, listed, share
from data_scale_simulation import GB, HOUR, Cluster, Phase, Trouble, simulate

RATES = Path(__file__).parents[2] / "docs/benchmarks/2026-11-21-data-memory.json"

TB = 1e12

BATCH_MEMORY = 70e6
"""Of a task, whatever its size: some copies of a row group, and the compiled kernels' room."""

NEAR_BANDS = 32
"""At the default threshold; 12 bytes each, beside a signature of 1 kB."""


@dataclass(frozen=True)
class Corpus:
    """How much text, and what becomes of it."""

    text: float
    """Bytes of raw text."""
    document: float = 5000.0
    """Bytes of a document."""
    compression: float = 2.6
    """Text by its bytes on disk: zstd at level 1, of program text and of web pages alike."""
    token: float = 4.2
    """Bytes of text in a token."""
    token_bytes: float = 2.0
    """In the token file: 2 for a vocabulary below 65,500, 4 above."""
    clean_keeps: float = 0.5
    dedup_keeps: float = 0.8
    near_keeps: float = 0.7
    substring_keeps: float = 0.9
    near_meet: float = 0.3
    """Share of documents that meet another one in a band, so that their signatures are read."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a phase for a byte of the station's text, and for a document."""

    byte: float = 0.0
    document: float = 0.0


def read_costs(path: Path) -> dict[str, Cost]:
    """What `data_memory.py` measured on its largest corpus, by station/phase.

    Phases that read text are counted by its bytes, phases that compare hashes and bands by documents.
    """
    sizes = json.loads(path.read_text(encoding="utf-8"))["sizes"]
    stations = sizes[max(sizes, key=float)]
    found: dict[str, Cost] = {}
    before = stations["clean"]
    for station, figures in stations.items():
        text = figures.get("text_bytes_in") or before["text_bytes"]
        documents = figures.get("documents_in") or before["documents"]
        for name, phase in (figures["phases"] or {"all": figures}).items():
            of_documents = name.split("-")[0] in ("match", "cluster", "mask")
            seconds = phase["cpu_seconds"]
            cost = Cost(document=seconds / documents) if of_documents else Cost(byte=seconds / text)
            found[f"{station}/{re.sub('-[0-9]+$', '', name)}"] = cost  # match-8: of 8 partitions
        before = figures
    return found


@dataclass
class Plan:
    """Gathers the phases of a corpus, station by station."""

    corpus: Corpus
    costs: dict[str, Cost]
    phases: list[Phase] = field(default_factory=list)
    name: str = ""
    """Of the station at hand; below, what it reads."""
    text: float = 0.0
    documents: float = 0.0
    num_shards: int = 1

    def station(self, name: str, text: float, documents: float) -> None:
        """The phases that follow are of a station that reads so much."""
        self.name, self.text, self.documents = name, text, documents
        self.num_shards = max(1, math.ceil(text / shard_size(text)))

    def add(
        self,
        name: str,
        num_tasks: int,
        *,
        reads: float = 0.0,
        writes: float = 0.0,
        small_reads: float = 0.0,
        memory: float = 0.0,
        cost: str | None = None,
    ) -> None:
        """Append a phase.

        Args:
            name: of the phase.
            num_tasks: how many it has.
            reads: bytes that all of them read.
            writes: bytes that all of them write.
            small_reads: of a task.
            memory: of a task, beside BATCH_MEMORY.
            cost: name of a measured phase; None for one that only moves bytes.
        """
        cpu = self.costs[f"{self.name}/{cost}"] if cost else Cost()
        seconds = cpu.byte * self.text + cpu.document * self.documents
        each = (seconds / num_tasks, reads / num_tasks, writes / num_tasks, small_reads, BATCH_MEMORY + memory)
        self.phases.append(Phase(self.name, name, num_tasks, *each))


def stations(corpus: Corpus, costs: dict[str, Cost], *, task_memory: float) -> list[Phase]:
    """The phases of a recipe, as megalite/data cuts them.

    Args:
        corpus: what goes in.
        costs: from `read_costs`.
        task_memory: bytes that a task of the substring station may take: the number of its partitions follows.
    """
    plan = Plan(corpus, costs)
    text, documents = corpus.text, corpus.text / corpus.document
    packed = 1 / corpus.compression

    plan.station("clean", text, documents)
    plan.add("clean", plan.num_shards, reads=packed * text, writes=packed * text, cost="clean")
    text, documents = text * corpus.clean_keeps, documents * corpus.clean_keeps

    plan.station("dedup", text, documents)
    shards, parts = plan.num_shards, min(256, max(1, math.ceil(documents / (1 << 24))))
    kept = corpus.dedup_keeps
    plan.add("hash", shards, reads=packed * text, writes=54 * documents, cost="hash")  # 24 of hashes, names
    compared = {"small_reads": shards, "memory": 60 * documents / parts}
    plan.add("match", parts, reads=24 * documents, writes=16 * (1 - kept) * documents, **compared, cost="match")
    plan.add("keep", shards, reads=packed * text, writes=packed * kept * text, small_reads=parts, cost="keep")
    text, documents = text * kept, documents * kept

    plan.station("near-dedup", text, documents)
    shards, kept = plan.num_shards, corpus.near_keeps
    parts = max(8, math.ceil(documents * NEAR_BANDS / (1 << 23)))
    entries, signatures = 12 * NEAR_BANDS * documents, 1024 * documents
    signed = {"reads": packed * text, "writes": entries + signatures + 8 * documents}
    plan.add("sign", shards, **signed, memory=1400 * documents / shards, cost="sign")
    compared = {"small_reads": shards, "memory": 50 * NEAR_BANDS * documents / parts}
    edges = 16 * corpus.near_meet * documents
    plan.add("match", parts, reads=entries + corpus.near_meet * signatures, writes=edges, **compared, cost="match")
    alike = corpus.near_meet * documents
    plan.add("cluster", 1, reads=2 * edges, writes=16 * alike, small_reads=parts, memory=56 * alike, cost="cluster")
    plan.add("mask", shards, writes=9 * documents, reads=16 * alike, cost="mask")
    plan.add("write", shards, reads=packed * text, writes=packed * kept * text, cost="write")
    text, documents = text * kept, documents * kept

    plan.station("substring-dedup", text, documents)
    shards, kept = plan.num_shards, corpus.substring_keeps
    needed = 1.0 * text + 5 * (1 - kept) * text
    parts = min(65_536, max(16, math.ceil(needed / task_memory)))
    runs = 0.8 * text
    listed = {"reads": packed * text, "writes": text + runs, "memory": text / shards}
    plan.add("windows", shards, **listed, cost="substring-windows")
    compared = {"small_reads": 2 * shards, "memory": needed / parts}
    plan.add("repeats", parts, reads=runs + 2 * (1 - kept) * text, **compared, cost="substring-repeats")
    plan.add("spans", shards, small_reads=parts, cost="substring-spans")
    plan.add("write", shards, reads=packed * text, writes=packed * kept * text, cost="write")
    text, documents = text * kept, documents * kept

    plan.station("tokens/train", text, documents)
    tokens = corpus.token_bytes * text / corpus.token
    plan.add("encode", plan.num_shards, reads=packed * text, writes=tokens, cost="encode")
    plan.add("join", 1, reads=tokens, writes=tokens, small_reads=plan.num_shards, memory=40 * documents)

    plan.station("packed/train", text, documents)
    plan.add("pack", 1, reads=20 * documents + tokens, writes=20 * documents, memory=70 * documents, cost="all")
    return plan.phases


def shard_size(text: float) -> float:
    """Bytes of text in a shard: `megalite.corpus.shards.shard_size`."""
    return min(max(text / 64, 4e6), 256e6)


def table(phases: Sequence[Phase], cluster: Cluster, trouble: Trouble, seed: int) -> str:
    """A Markdown table of what `simulate` says without trouble and with it."""
    calm, rough = simulate(phases, cluster), simulate(phases, cluster, trouble, seed=seed)
    rows = [
        "| station | phase | tasks | core hours | TB read | TB written | M small reads | GB a task | hours "
        "| with trouble | done again |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for phase, smooth, bumpy in zip(phases, calm, rough, strict=True):
        core_hours = phase.num_tasks * phase.cpu_seconds / HOUR
        moved = [phase.num_tasks * amount / TB for amount in (phase.bytes_read, phase.bytes_written)]
        rows.append(
            f"| {phase.station} | {phase.name} | {phase.num_tasks:,} | {core_hours:,.1f} | {moved[0]:,.2f} "
            f"| {moved[1]:,.2f} | {phase.num_tasks * phase.small_reads / 1e6:,.1f} | {phase.memory / GB:,.2f} "
            f"| {smooth.seconds / HOUR:,.2f} | {bumpy.seconds / HOUR:,.2f} | {bumpy.lost:,} |"
        )
    totals = [sum(each.seconds for each in outcomes) / HOUR for outcomes in (calm, rough)]
    core_hours = sum(phase.num_tasks * phase.cpu_seconds for phase in phases) / HOUR
    read, written = (
        sum(phase.num_tasks * getattr(phase, name) for phase in phases) / TB for name in ("bytes_read", "bytes_written")
    )
    rows.append(
        f"| **all** | | | {core_hours:,.0f} | {read:,.1f} | {written:,.1f} | | | **{totals[0]:,.1f}** "
        f"| **{totals[1]:,.1f}** | {sum(each.lost for each in rough):,} |"
    )
    return "\n".join(rows)


def main() -> None:
    options = parse_options()
    cluster = Cluster(options.nodes, options.cores, options.disk_gbs, options.node_gbs, options.reads_per_second)
    trouble = Trouble(options.spread, options.slow_share, options.slow_factor, options.hours_between_failures)
    costs = read_costs(options.rates)
    for tb in options.tb:
        corpus = Corpus(tb * TB, options.document_bytes)
        print(f"\n{tb:g} TB of text in {corpus.text / corpus.document:,.0f} documents, {cluster}, {trouble}\n")
        print(table(stations(corpus, costs, task_memory=options.task_gb * GB), cluster, trouble, options.seed))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cluster, trouble = Cluster(), Trouble(0.2, 0.02, 2.0, 2000.0)
    several = {"type": listed(amount), "default": [1.0, 100.0]}
    parser.add_argument("--tb", help="sizes of the corpora, 10^12 bytes of text", **several)
    parser.add_argument("--document-bytes", type=amount, default=5000.0, help="of text in a document")
    parser.add_argument("--nodes", type=count, default=cluster.nodes)
    parser.add_argument("--cores", type=count, default=cluster.cores, help="of a node; one worker each")
    parser.add_argument("--disk-gbs", type=amount, default=cluster.disk_gbs, help="GB/s of the shared disk")
    parser.add_argument("--node-gbs", type=amount, default=cluster.node_gbs, help="GB/s of a node's network")
    parser.add_argument(
        "--reads-per-second", type=amount, default=cluster.reads_per_second, help="small ones, of the disk"
    )
    parser.add_argument("--task-gb", type=amount, default=2.0, help="memory of a task that compares passages")
    parser.add_argument("--spread", type=float, default=trouble.spread, help="of the logarithm of a task's length")
    parser.add_argument("--slow-share", type=share, default=trouble.slow_share, help="of nodes")
    parser.add_argument("--slow-factor", type=amount, default=trouble.slow_factor)
    parser.add_argument(
        "--hours-between-failures", type=amount, default=trouble.hours_between_failures, help="of a node"
    )
    parser.add_argument("--rates", type=existing, default=RATES, help="what data_memory.py wrote")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
