"""How much memory each data station takes as the corpus grows: a table, a JSON file and a plot.

    python tools/benchmarks/data_memory.py [--mb 25,50,100,250] [--out docs/benchmarks/2026-11-21-data-memory]

A whole recipe runs once for each size (corpora by `corpus.py`, with planted duplicates). Then each of its stations runs
once more in a process of its own, which first runs the recipe on a tiny corpus, so that imports and compiled kernels do
not count. Two peaks are measured above that start, in one process and one thread:

    private   what the process alone holds (RssAnon): the figure that matters
    resident  mapped files too, as far as they lie in memory (VmRSS); the system drops those when it needs room

Linux keeps no peak of the first, so both are looked at every two milliseconds.

The JSON also has the CPU seconds and the bytes of each phase of a station, from which `data_scale.py` reckons.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import amount, count, listed, new_folder, out_file

HERE = Path(__file__).parent

STATIONS = ("clean", "dedup", "near-dedup", "line-dedup", "substring-dedup", "tokens/train", "packed/train")

RULES = {
    "max_repeated_line_share": 1.0,
    "min_alphanumeric_share": 0.0,
    "c4": {
        "terminal_punctuation": False,
        "min_words_per_line": None,
        "reject_curly_bracket": False,
        "min_sentences": None,
    },
    "gopher_quality": {"min_words": 1, "max_words": 10**9, "min_stop_words": 0, "min_letter_chunk_share": 0.0},
    "gopher_repetition": {
        **{f"max_top_{length}gram_char_share": 1.0 for length in (2, 3, 4)},
        **{f"max_duplicate_{length}gram_char_share": 1.0 for length in range(5, 11)},
        "max_duplicate_line_share": 1.0,
        "max_duplicate_line_char_share": 1.0,
    },
    "fineweb": {
        "min_terminal_line_share": 0.0,
        "max_short_line_share": 1.0,
        "max_duplicate_line_char_share": 1.0,
        "max_newlines_per_chunk": 1e6,
    },
    "privacy": {},
}
"""All are reckoned, and hardly any rejects: the text of manuals and programs shall reach the other stations."""

TIMEOUT_SECONDS = 600.0

SAMPLE_SECONDS = 0.002

TINY_MB = 0.5

ONE_THREAD = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1000000",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
}
"""And an allocator that gives back what is large when it is freed, so that a peak is what a station holds."""


@dataclass(frozen=True)
class Job:
    """What a process does: the recipe on a corpus, and one of its stations again, measured."""

    corpus: str
    tiny: str
    tokenizer: str
    out: str
    scratch: str
    station: str | None = None


class Peak:
    """Watches this process's memory from another thread; use as a context manager, also inside another."""

    def __enter__(self) -> Peak:
        self._stop = threading.Event()
        self._before = _status()
        self._most = dict(self._before)
        self._cpu = time.process_time()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            now = _status()
            self._most = {name: max(most, now[name]) for name, most in self._most.items()}

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def figures(self) -> dict[str, float]:
        """MB above the start, and CPU seconds of all threads."""
        return {
            "private_mb": self._most["RssAnon"] - self._before["RssAnon"],
            "resident_mb": self._most["VmRSS"] - self._before["VmRSS"],
            "cpu_seconds": time.process_time() - self._cpu,
        }


def make_meter(phases: dict[str, Any]) -> Any:
    """A runner that does the tasks here, and notes what each phase took."""
    from megalite.stations.runners import InProcess

    class Meter(InProcess):
        def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
            before = _bytes_below(folder)
            with Peak() as peak:
                yield from super().run(folder, phase, numbers)
            written = _bytes_below(folder) - before
            phases[phase] = {"tasks": len(numbers), "written_mb": written / 1e6, **peak.figures()}

    return Meter()


class Stopwatch:
    """A progress display that measures a station between its start and its end."""

    def __init__(self) -> None:
        self.stations: list[dict[str, Any]] = []

    def start(self, title: str, total: float | None, unit: str) -> None:
        self._title, self._peak = title, Peak().__enter__()

    def advance(self, amount: float) -> None:
        pass

    def finish(self, summary: str) -> None:
        self._peak.__exit__()
        self.stations.append({"title": self._title, "summary": summary, **self._peak.figures()})


def work(job: Job) -> dict[str, Any]:
    """In a process of its own: run the recipe, or one station of it again."""
    import pyarrow as pa

    from megalite.corpus.prepare import prepare

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if job.station is None:
        prepare(recipe(job.corpus, job.tokenizer, job.out))
        return {}
    prepare(recipe(job.tiny, job.tokenizer, job.scratch))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    shutil.rmtree(Path(job.out) / job.station)
    phases: dict[str, Any] = {}
    watch = Stopwatch()
    done = prepare(recipe(job.corpus, job.tokenizer, job.out), runner=make_meter(phases), progress=watch)
    (measured,) = watch.stations  # the others were found done
    counts = next(each.result.manifest.counts for each in done if each.name == job.station)
    known = ("documents_in", "documents", "text_bytes_in", "text_bytes", "tokens")
    sizes = {"written_mb": _bytes_below(Path(job.out) / job.station) / 1e6}
    return {**measured, **sizes, **{name: counts[name] for name in known if name in counts}, "phases": phases}


def recipe(corpus: str, tokenizer: str, out: str) -> Any:
    """All rules, and every station that compares documents."""
    from megalite.corpus.recipe import DataRecipe

    return DataRecipe.model_validate(
        {
            "out": out,
            "sources": [{"path": corpus, "id_field": "id"}],
            "clean": RULES,
            "near_dedup": {},
            "line_dedup": {},
            "substring_dedup": {},
            "tokenizer": {"path": tokenizer},
            "valid_fraction": 0.0,
        }
    )


def _status() -> dict[str, float]:
    """Memory of this process, MB."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = (line.split() for line in file)
        return {field[0][:-1]: int(field[1]) * 1024 / 1e6 for field in fields if field[0] in ("VmRSS:", "RssAnon:")}


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def ask(job: Job) -> dict[str, Any]:
    """Run `work` in a process of its own."""
    command = [sys.executable, str(Path(__file__).absolute()), "--job", json.dumps(vars(job))]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(f"{job.station or 'the recipe'} on {job.corpus} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_corpus(folder: Path, mb: float, seed: int) -> Path:
    """Real text of this machine with planted duplicates; what is there already stays."""
    if not (folder / "stats.json").is_file():  # the last file that it writes
        command = [sys.executable, str(HERE / "corpus.py"), "--out", str(folder), "--mb", str(mb), "--seed", str(seed)]
        subprocess.run([*command, "--dups"], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS)
    return folder / "corpus_dup.jsonl"


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of each station by size of the corpus."""
    from megalite.corpus.corpus import Corpus
    from megalite.corpus.recipe import DocumentSource
    from megalite.corpus.stations.train_tokenizer import train_tokenizer
    from megalite.tokenizer.settings import TokenizerConfig

    work_folder = options.work.absolute()
    tiny = make_corpus(work_folder / "tiny", TINY_MB, options.seed)
    tokenizer = work_folder / "tokenizer"
    config = TokenizerConfig(kind="byte-bpe", vocab_size=options.vocab, train_mb=10 * TINY_MB)
    train_tokenizer(Corpus([DocumentSource(path=tiny)]), tokenizer, config)
    figures: dict[str, dict[str, Any]] = {}
    for mb in options.mb:
        folder = work_folder / f"corpus-{mb:g}"
        corpus = make_corpus(folder, mb, options.seed)
        places = {"out": str(folder / "out"), "scratch": str(folder / "scratch"), "tokenizer": str(tokenizer)}
        job = Job(corpus=str(corpus), tiny=str(tiny), **places)
        ask(job)
        figures[f"{mb:g}"] = {}
        for station in STATIONS:
            shutil.rmtree(places["scratch"], ignore_errors=True)
            found = ask(Job(**{**vars(job), "station": station}))
            figures[f"{mb:g}"][station] = found
            print(f"{mb:5g} MB  {station:16} {found['private_mb']:6.0f} MB  {found['summary']}", flush=True)
    return figures


def show(figures: dict[str, dict[str, Any]]) -> str:
    """A Markdown table: private peaks, with the resident ones in brackets."""
    lines = [
        "| station | " + " | ".join(f"{mb} MB" for mb in figures) + " |",
        "|---|" + "---|" * len(figures),
    ]
    for station in STATIONS:
        cells = (f"{of[station]['private_mb']:.0f} ({of[station]['resident_mb']:.0f})" for of in figures.values())
        lines.append(f"| {station} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(figures: dict[str, dict[str, Any]]) -> str:
    """The private peaks as an SVG of some kilobytes: a line for each station."""
    width, height, left, bottom, right = 640, 360, 50, 40, 150
    sizes = [float(mb) for mb in figures]
    peaks = {station: [of[station]["private_mb"] for of in figures.values()] for station in STATIONS}
    most = max(max(peaks.values(), key=max)) * 1.1
    step = next(each for each in (5, 10, 20, 50, 100, 200, 500, 1000) if most / each <= 8)

    def at(mb: float, peak: float) -> str:
        x = left + (width - left - right) * mb / max(sizes)
        return f"{x:.1f},{height - bottom - (height - bottom - 10) * peak / most:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11"><title>Private memory of each station by size of the corpus</title>'
    ]
    for tick in range(0, int(most) + 1, step):
        y = at(0, tick).split(",")[1]
        parts.append(f'<path d="M{left} {y}H{width - right}" stroke="#ddd"/><text x="5" y="{y}">{tick} MB</text>')
    for mb in sizes:
        parts.append(f'<text x="{at(mb, 0).split(",")[0]}" y="{height - 20}" text-anchor="middle">{mb:g}</text>')
    parts.append(f'<text x="{left}" y="{height - 5}">MB of text</text>')
    labels = sorted(STATIONS, key=lambda station: -peaks[station][-1])
    for number, station in enumerate(labels):
        colour = f"hsl({360 * STATIONS.index(station) // len(STATIONS)} 65% 40%)"
        points = " ".join(at(mb, peak) for mb, peak in zip(sizes, peaks[station], strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - right + 10}" y="{30 + 18 * number}" fill="{colour}">{station}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    options = parse_options()
    if options.job:
        print(json.dumps(work(Job(**json.loads(options.job)))), flush=True)
        return
    figures = measure(options)
    print("\n" + show(figures))
    if options.out:
        about = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "seed": options.seed}
        options.out.with_suffix(".json").write_text(json.dumps({**about, "sizes": figures}, indent=1) + "\n")
        options.out.with_suffix(".svg").write_text(draw(figures))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"type": listed(amount), "default": [25.0, 50.0, 100.0, 250.0]}
    parser.add_argument("--mb", help="sizes of the corpora, million bytes of text", **sizes)
    parser.add_argument("--seed", type=int, default=2, help="another seed takes other text")
    parser.add_argument("--vocab", type=count, default=8000, help="vocabulary of the tokenizer")
    parser.add_argument(
        "--work", type=new_folder, default=Path("runs/benchmark-data-memory"), help="for corpora and outputs"
    )
    parser.add_argument("--out", type=out_file, help="write this name with .json and .svg")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
