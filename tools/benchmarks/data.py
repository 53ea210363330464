"""The data stations on this CPU, against other tools on the same corpus, in one run.

    python tools/benchmarks/data.py [--mb 50] [--seed 2] [--rounds 2] [--only near,pack] [--large] [--out FILE.json]

Text is made by `corpus.py`, with planted duplicates and the truth about them. Every case runs in a process of its own,
in one thread, and reads and writes files in a local folder; cases are interleaved, round by round, because the speed of
a shared machine drifts, and the figure of a case is its median. Speed is million bytes of text, or million tokens, a
CPU second, which depends little on who else uses the machine. Each process warms up on a tiny corpus first, so neither
imports nor the compiling of kernels count (`data_measure.py`), and the words of that corpus are in a tokenizer's cache.

Other tools run where they are installed; PYTHONPATH may point at a folder made by `pip install --target`. Those that
would take minutes read a part of the corpus: the column `read` says how much. Packing and loading work on the tokens
laid end to end several times, see `data_inputs.py`; the fewer documents, the more padding.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from arguments import amount, count, names_of, new_folder, out_file
from data_inputs import KINDS, SEQ_LENS, TIMEOUT_SECONDS, prepare
from data_measure import Job

HERE = Path(__file__).parent

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

PEER_RATIO = 2.5
"""How many times as fast as the best peer a station is asked to be."""


LARGE_MB = 250.0
"""For what is asked of a station that is at work for a while: two processes are compared with one."""

LARGE = f", {LARGE_MB:g} MB"

SHOWN = ("speed", "cpu_seconds", "wall_seconds", "peak_mb", "extra_mb", "amount")
"""Figures with a column of their own."""


@dataclass(frozen=True)
class Entry:
    """A case of the benchmark."""

    name: str
    group: str
    case: str
    setting: str = ""
    role: str = "ours"
    """`ours`; `peer`, whom ours is compared with; `engine`, a library or a bare loop that a station is built upon or
    could be: shown, and no peer, for it does a part of the work."""
    needs: tuple[str, ...] = ()
    """Modules it imports."""
    install: str = ""
    """What brings them."""
    num_shards: int | None = None
    """Read only so many shards of about 4 MB."""
    mb: float | None = None
    """Another size of the corpus than the command's."""


@dataclass(frozen=True)
class Target:
    """What is asked of a case."""

    entry: str
    figure: str
    limit: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Whether a measured value is good enough."""
        return value <= self.limit if self.at_most else value >= self.limit


def entries(large: bool) -> list[Entry]:
    """All cases."""
    return [*_cleaning(), *_deduplication(), *_tokens(), *_memory(large)]


def _cleaning() -> list[Entry]:
    needs = {"needs": ("datatrove", "spacy"), "install": "datatrove[processing]", "num_shards": 1}
    return [
        Entry("rules", "clean-rules", "rules", "plain"),
        Entry("datatrove", "clean-rules", "datatrove", "plain", "peer", **needs),
        Entry("rules + repetition", "clean-repetition", "rules", "repetition"),
        Entry("datatrove + repetition", "clean-repetition", "datatrove", "repetition", "peer", **needs),
        Entry("clean, 1 worker", "clean-station", "clean", "1"),
        Entry("clean, 2 workers", "clean-station", "clean", "2"),
        Entry(f"clean, 1 worker{LARGE}", "clean-scaling", "clean", "1", mb=LARGE_MB),
        Entry(f"clean, 2 workers{LARGE}", "clean-scaling", "clean", "2", mb=LARGE_MB),
    ]


def _deduplication() -> list[Entry]:
    return [
        Entry("exact", "exact-bytes", "exact", "bytes"),
        Entry("exact, blanks", "exact-blanks", "exact", "blanks"),
        Entry("polars", "exact-bytes", "polars", "bytes", "peer", ("polars",), "polars"),
        Entry("duckdb", "exact-bytes", "duckdb", "", "peer", ("duckdb",), "duckdb"),
        Entry("pyarrow", "exact-bytes", "pyarrow", "", "peer"),
        Entry("text-dedup exact", "exact-bytes", "text-dedup exact", "", "peer", ("text_dedup", "scipy"), "text-dedup"),
        Entry("zstd, unpack", "exact-bytes", "zstd", "bytes", "engine"),
        Entry("exact station", "exact-station", "exact", "station bytes"),
        Entry("exact station, blanks", "exact-station-blanks", "exact", "station blanks"),
        Entry("zstd, unpack and pack", "exact-station", "zstd", "station", "engine"),
        Entry("polars, written", "exact-station", "polars", "station", "peer", ("polars",), "polars"),
        Entry("near", "near", "near"),
        Entry("datasketch", "near", "datasketch", "", "peer", ("datasketch",), "datasketch"),
        Entry("rensa", "near", "rensa", "", "peer", ("rensa",), "rensa"),
        Entry("text-dedup", "near", "text-dedup", "", "peer", ("text_dedup", "click_option_group"), "text-dedup"),
        Entry("substring", "substring", "substring", "find"),
        Entry("substring, in memory", "substring", "substring", "memory"),
        Entry("substring station", "substring", "substring", "station"),
    ]


def _tokens() -> list[Entry]:
    found = []
    for kind in KINDS:
        group = f"tokenize-{kind}"
        found.append(Entry(kind, group, "tokenize", kind))
        found.append(Entry(f"tokenizers {kind}", group, "tokenizers", kind, "peer", num_shards=4))
        if kind.startswith("sentencepiece"):
            found.append(Entry(f"library {kind}", group, "sentencepiece", kind, "peer", num_shards=4))
    giga = {"needs": ("gigatoken", "awkward"), "install": "gigatoken awkward"}
    found.append(Entry("gigatoken", "tokenize-byte-bpe-gpt2", "gigatoken", "byte-bpe-gpt2", "engine", **giga))
    for seq_len in SEQ_LENS:
        packing, loading = f"pack-{seq_len}", f"load-{seq_len}"
        found += [
            Entry(f"pack {seq_len}", packing, "pack", f"{seq_len}"),
            Entry(f"pack, read {seq_len}", packing, "pack-and-read", f"{seq_len}"),
            Entry(f"trl bfd_split {seq_len}", packing, "trl", f"{seq_len}", "peer", ("trl",), "trl"),
            Entry(f"first-fit {seq_len}", packing, "first-fit", f"{seq_len}", "engine"),
            Entry(f"load packed {seq_len}", loading, "load", f"packed {seq_len}"),
            Entry(f"load concat {seq_len}", loading, "load", f"concat {seq_len}"),
            Entry(f"memmap gather {seq_len}", loading, "memmap", f"{seq_len}", "engine"),
            Entry(f"megatron {seq_len}", loading, "megatron", f"{seq_len}", "peer", ("megatron",), "megatron-core"),
        ]
    return found


def _memory(large: bool) -> list[Entry]:
    sizes = (25, 50, 100, 250) if large else (25, 50, 100)
    cases = {"near": "", "substring": "find"}
    return [
        Entry(f"{case} of {size} MB", f"memory-{case}", case, setting, mb=float(size))
        for case, setting in cases.items()
        for size in sizes
    ]


TARGETS = [
    Target("rules", "speed", 100),
    Target("rules + repetition", "speed", 60),
    Target(f"clean, 2 workers{LARGE}", "speed-up", 1.8),
    Target("exact", "speed", 400),
    Target("near", "speed", 80),
    Target("near", "precision_0.7", 0.93),
    Target("near", "recall_0.8", 0.99),
    Target("substring", "speed", 25),
    Target("substring, in memory", "speed", 25),
    Target("substring, in memory", "bytes_a_byte", 2.0, at_most=True),
    Target("byte-bpe", "speed", 80),
    Target("byte-bpe-gpt2", "speed", 80),
    Target("sentencepiece-bpe", "speed", 30),
    Target("sentencepiece-unigram", "speed", 14),
    *(Target(f"pack, read {seq_len}", "speed", 240) for seq_len in SEQ_LENS),
    *(Target(f"pack {seq_len}", "padding_percent", 0.02, at_most=True) for seq_len in SEQ_LENS),
    *(Target(f"load {layout} 2048", "speed", 200) for layout in ("packed", "concat")),
    *(Target(f"load {layout} 8192", "speed", 700) for layout in ("packed", "concat")),
]


def run(entry: Entry, folder: Path, is_judged: bool) -> dict[str, float] | None:
    """Run a case once; None when it failed, with its last words on stderr."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    job = Job(entry.case, entry.setting, str(folder), str(folder / "tiny"), str(scratch), entry.num_shards, is_judged)
    command = [sys.executable, str(HERE / "data_cases.py"), json.dumps(asdict(job))]
    environment = {**os.environ, **ONE_THREAD}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{entry.name} took more than {TIMEOUT_SECONDS:.0f} s", file=sys.stderr)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"amount"')]
    if not lines:
        print(f"{entry.name} failed:\n" + "\n".join(done.stderr.splitlines()[-5:]), file=sys.stderr)
        return None
    figures = json.loads(lines[-1])
    figures["speed"] = figures["amount"] / figures["cpu_seconds"]
    if _unit(entry) == "MB":
        figures["bytes_a_byte"] = figures["extra_mb"] / figures["amount"]
    return figures


def measure(chosen: Sequence[Entry], folder_of: Callable[[Entry], Path], rounds: int) -> dict[str, list[dict]]:
    """Run all cases round by round; what takes time to judge is judged in the first."""
    results: dict[str, list[dict]] = {entry.name: [] for entry in chosen}
    for number in range(rounds):
        for entry in chosen:
            figures = run(entry, folder_of(entry), is_judged=number == 0 and entry.mb is None)
            if figures is not None:
                results[entry.name].append(figures)
                speed, unit = figures["speed"], _unit(entry)
                print(f"round {number + 1}  {entry.name:34} {speed:8.2f} {unit} a CPU second", flush=True)
    return results


def summarise(chosen: Sequence[Entry], results: dict[str, list[dict]]) -> list[dict]:
    """Median figures of each case; of ours, how many times as fast as the best peer of its group, and the speed-up of
    several workers by the clock."""
    rows = []
    for entry in chosen:
        if measured := results.get(entry.name):
            names = dict.fromkeys(name for figures in measured for name in figures)
            median = {name: statistics.median(each[name] for each in measured if name in each) for name in names}
            rows.append({"case": entry.name, "group": entry.group, "role": entry.role, "unit": _unit(entry), **median})
    for row in rows:
        peers = [each for each in rows if each["group"] == row["group"] and each["role"] == "peer"]
        if row["role"] == "ours" and peers:
            best = max(peers, key=lambda peer: peer["speed"])
            row |= {"best_peer": best["case"], "peer_ratio": row["speed"] / best["speed"]}
        alone = next((each for each in rows if each["case"] == row["case"].replace("2 workers", "1 worker")), row)
        if alone is not row:
            row["speed-up"] = alone["wall_seconds"] / row["wall_seconds"]
    return rows


def verdicts(rows: Sequence[dict]) -> list[dict]:
    """What was asked of the cases that ran, what was measured, and whether it is met."""
    by_case = {row["case"]: row for row in rows}
    ratios = [Target(row["case"], "peer_ratio", PEER_RATIO) for row in rows if "peer_ratio" in row]
    return [
        {**asdict(target), "value": value, "met": target.met(value)}
        for target in [*TARGETS, *ratios]
        if (value := by_case.get(target.entry, {}).get(target.figure)) is not None
    ]


def show(rows: Sequence[dict], asked: Sequence[dict]) -> None:
    """Print the figures of all cases, then what was asked beside what was measured."""
    print(
        f"\n{'case':34} {'speed':>9} a CPU s {'read':>6} {'CPU s':>7} {'wall s':>7} {'peak MB':>8} {'of the run':>10}"
    )
    for row in rows:
        further = {name: value for name, value in row.items() if name not in SHOWN and not isinstance(value, str)}
        print(
            f"{row['case']:34} {row['speed']:9.2f} {row['unit']:7} {row['amount']:6.0f} {row['cpu_seconds']:7.2f} "
            f"{row['wall_seconds']:7.2f} {row['peak_mb']:8.0f} {row['extra_mb']:10.0f}   "
            + ", ".join(f"{name} {value:.4g}" for name, value in further.items())
        )
    show_memory(rows)
    print(f"\n{'case':34} {'figure':16} {'asked':>9} {'measured':>9}")
    for each in asked:
        sign = "<=" if each["at_most"] else ">="
        verdict = "met" if each["met"] else "missed"
        print(f"{each['entry']:34} {each['figure']:16} {sign} {each['limit']:6g} {each['value']:9.3f}  {verdict}")


def show_memory(rows: Sequence[dict]) -> None:
    """Print what the peak of memory lies above the start, by the size of the corpus. Files that are mapped count."""
    for group in dict.fromkeys(row["group"] for row in rows if row["group"].startswith("memory-")):
        own = [row for row in rows if row["group"] == group]
        figures = "   ".join(f"{row['amount']:.0f} MB: {row['extra_mb']:.0f}" for row in own)
        print(f"{group:34} {figures}")


def main() -> None:
    options = parse_options()
    chosen = [entry for entry in entries(options.large) if is_wanted(entry, options.only)]
    missing = {entry.install for entry in chosen if not all(map(importlib.util.find_spec, entry.needs))}
    if missing:
        print(f"left out, for they are not installed: pip install {' '.join(sorted(missing))}")
    chosen = [entry for entry in chosen if entry.install not in missing]

    def folder_of(entry: Entry) -> Path:
        return options.work.absolute() / f"corpus-{entry.mb or options.mb:g}-{options.seed}"

    for folder in dict.fromkeys(map(folder_of, chosen)):
        readers = [entry for entry in chosen if folder_of(entry) == folder]
        mb = readers[0].mb or options.mb
        prepare(folder, {e.group for e in readers}, mb=mb, seed=options.seed, vocab_size=options.vocab)
    rows = summarise(chosen, measure(chosen, folder_of, options.rounds))
    asked = verdicts(rows)
    show(rows, asked)
    if options.out:
        about = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "left_out": sorted(missing)}
        record = {**about, "mb": options.mb, "seed": options.seed, "rounds": options.rounds}
        options.out.write_text(json.dumps({**record, "rows": rows, "asked": asked}, indent=1) + "\n")


GROUPS = ("clean", "exact", "near", "substring", "tokenize", "pack", "load", "memory")


def is_wanted(entry: Entry, only: list[str] | None) -> bool:
    """Whether a group is asked for: by its name, or by its first words."""
    return only is None or any(entry.group == each or entry.group.startswith(f"{each}-") for each in only)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=amount, default=50, help="million bytes of text")
    parser.add_argument("--seed", type=int, default=2, help="another seed takes other text")
    parser.add_argument("--vocab", type=count, default=32000, help="vocabulary of the tokenizers")
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--only", type=names_of(GROUPS), help="some of " + ", ".join(GROUPS))
    parser.add_argument("--large", action="store_true", help="measure memory at 250 MB too")
    parser.add_argument("--work", type=new_folder, default=Path("data/benchmark"), help="folder to keep the corpora in")
    parser.add_argument("--out", type=out_file, help="write the figures to this JSON file")
    return parser.parse_args()


def _unit(entry: Entry) -> str:
    return "Mtok" if entry.group.startswith(("pack-", "load-")) else "MB"


if __name__ == "__main__":
    main()
