"""Export and import of a large model on this machine, against a plain copy of the same bytes in the same run.

    python tools/benchmarks/export.py [--size 1b3|tiny] [--rounds 1] [--verify-blocks 2] [--folder DIR] [--json FILE]

    checkpoint, fp32, random weights --to-hf--> folder, fp32 --from-hf--> checkpoint
                                     --to-hf--> folder, bf16

Every case is a process of its own. What it reads is dropped from the page cache before, and what it writes is on the
disk (fsync) before its clock stops. The conversion is what reads and writes: checksums of the files that are read, then
read, check every number, round, lay out, checksum, write. A copy is that of the first GB of the same files, before and
after each conversion, since the disk's speed drifts. The rest is proof: every weight read back and compared, and logits
computed in two implementations. Memory is what the kernel cannot take back (RssAnon).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from arguments import count, folder, out_file

SIZES = {
    "1b3": {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "ffn_hidden_size": 5504, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "ffn_hidden_size": 192, "vocab_size": 500},
}
MAX_POSITIONS = 2048
POOL_NUMBERS = 1 << 24
LOOK_EVERY_SECONDS = 0.01
COPY_BYTES = 10**9
COPY_BLOCK_BYTES = 16 * 2**20

CASES = ("to-hf fp32", "from-hf fp32", "to-hf bf16")


class Pool:
    """A weight source: numbers out of one random pool, so that making a billion of them costs nothing."""

    def __init__(self):
        import torch

        generator = torch.Generator().manual_seed(0)
        self._numbers = torch.empty(POOL_NUMBERS).normal_(0.0, 0.02, generator=generator)

    def read(self, weight, rectangle):
        count = 1
        for size in rectangle.shape:
            count *= size
        repeats = -(-count // POOL_NUMBERS)
        return self._numbers.repeat(repeats)[:count].view(rectangle.shape) + (weight.init == "ones")


@dataclass
class Stage:
    """What a stage of a conversion took."""

    name: str
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    own_mb: float = 0.0
    """The most RssAnon, above what there was before the conversion."""
    child_mb: float = 0.0
    """The most RssAnon of the process that reads back."""


class Watch:
    """Follows a conversion from stage to stage, as it says what it begins."""

    def __init__(self):
        self.stages: list[Stage] = []
        self._before = rss_anon("self")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self.say("opening")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._end()

    def say(self, name: str) -> None:
        """A stage begins, and the one before it ends."""
        if self.stages:
            self._end()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self.stages.append(Stage(name))

    def _end(self) -> None:
        stage = self.stages[-1]
        stage.wall_seconds = time.perf_counter() - self._wall
        stage.cpu_seconds = time.process_time() - self._cpu

    def _look(self) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while not self._done.wait(LOOK_EVERY_SECONDS):
            stage = self.stages[-1]
            stage.own_mb = max(stage.own_mb, (rss_anon("self") - self._before) / 1e6)
            stage.child_mb = max([stage.child_mb, *(rss_anon(child) / 1e6 for child in children.read_text().split())])


def rss_anon(process: str) -> int:
    """Bytes; 0 when the process is gone."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def make_checkpoint(root: Path, size: str) -> None:
    """A checkpoint with weights only, as `from-hf` leaves it."""
    from megalite.checkpoint.hf.to_checkpoint import write_weights_only
    from megalite.config.fill import fill_model
    from megalite.config.schema import BatchConfig, ModelConfig

    model = fill_model(ModelConfig(**SIZES[size], max_positions=MAX_POSITIONS), BatchConfig())
    step = root / "run" / "step-0000000"
    step.mkdir(parents=True)
    write_weights_only(step, Pool(), model, data={"imported_from": "random numbers"})


def convert(case: str, root: Path, verify_blocks: int | None) -> dict[str, dict]:
    """Run one conversion; its stages."""
    from megalite.checkpoint.hf.exporter import to_hugging_face
    from megalite.checkpoint.hf.to_checkpoint import from_hugging_face

    direction, dtype = case.split()
    with Watch() as watch:
        if direction == "to-hf":
            to_hugging_face(root / "run", root / "out", dtype=dtype, verify_blocks=verify_blocks, say=watch.say)
        else:
            from_hugging_face(root / "hf", root / "out", verify_blocks=verify_blocks, say=watch.say)
    return {stage.name: asdict(stage) for stage in watch.stages}


def copy_gb_per_second(sources: list[Path], out: Path) -> float:
    """Copy COPY_BYTES, or all there is, in blocks of 16 MB, and have them on the disk; what is copied, a second."""
    drop_from_cache(sources)
    start, left = time.perf_counter(), COPY_BYTES
    with open(out, "wb", buffering=0) as file:
        for source in sources:
            with open(source, "rb", buffering=0) as opened:
                while left > 0 and (block := opened.read(min(COPY_BLOCK_BYTES, left))):
                    file.write(block)
                    left -= len(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    out.unlink()
    return (COPY_BYTES - left) / 1e9 / seconds


def drop_from_cache(files: list[Path]) -> None:
    """Have the next reading come from the disk."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def weights_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def measure(case: str, root: Path, verify_blocks: int | None) -> dict:
    """A copy, the conversion in a process of its own, a copy; what was written stays in ROOT/out."""
    from megalite.checkpoint.hf.stages import CHECKING_AND_WRITING, WRITING

    shutil.rmtree(root / "out", ignore_errors=True)
    sources = weights_in(root / ("run" if case.startswith("to-hf") else "hf"))
    copies = [copy_gb_per_second(sources, root / "copy")]
    drop_from_cache(sources)
    command = [sys.executable, __file__, "--one", case, "--folder", root]
    command += ["--verify-blocks", verify_blocks] if verify_blocks else []
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
    stages = json.loads(done.stdout.splitlines()[-1])
    copies.append(copy_gb_per_second(sources, root / "copy"))
    read, written = (sum(path.stat().st_size for path in files) for files in (sources, weights_in(root / "out")))
    seconds = stages[CHECKING_AND_WRITING if case.startswith("to-hf") else WRITING]["wall_seconds"]
    copied = (read + written) / 2  # a copy reads and writes as much; rounding writes less
    return {
        "read_gb": read / 1e9,
        "written_gb": written / 1e9,
        "seconds": seconds,
        "copy_gb_per_second": copies,
        "speed_over_copy": copied / 1e9 / seconds / statistics.mean(copies),
        "stages": stages,
    }


def report(case: str, found: dict) -> None:
    """A case and its stages."""
    copies = " and ".join(f"{speed:.2f}" for speed in found["copy_gb_per_second"])
    print(f"{case}: {found['read_gb']:.2f} GB read, {found['written_gb']:.2f} GB written in {found['seconds']:.1f} s")
    print(f"  {found['speed_over_copy']:.2f} of a copy's speed, which was {copies} GB/s before and after")
    for stage in found["stages"].values():
        print(
            f"  {stage['wall_seconds']:6.1f} s, {stage['cpu_seconds']:6.1f} s of CPU, {stage['own_mb']:6.0f} MB, "
            f"{stage['child_mb']:6.0f} MB in a child   {stage['name']}",
            flush=True,
        )


def main(arguments: argparse.Namespace, own: Callable[[str], dict]) -> None:
    """Make the checkpoint, run the cases in turn, clean up."""
    if arguments.one:
        print(json.dumps(own(arguments.one)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    root = Path(tempfile.mkdtemp(prefix="megalite-export-", dir=arguments.folder))
    results: dict[str, list[dict]] = {case: [] for case in CASES}
    try:
        make_checkpoint(root, arguments.size)
        for _ in range(arguments.rounds):
            for case in CASES:
                results[case].append(measure(case, root, arguments.verify_blocks))
                report(case, results[case][-1])
                if case == CASES[0]:
                    shutil.rmtree(root / "hf", ignore_errors=True)
                    (root / "out").rename(root / "hf")
    finally:
        shutil.rmtree(root)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1b3")
    parser.add_argument("--rounds", type=count, default=1)
    parser.add_argument("--verify-blocks", type=count, help="blocks to compute logits with; all by default")
    parser.add_argument("--folder", type=folder, help="where to work; needs 20 bytes a parameter")
    parser.add_argument("--json", type=out_file, help="file for all figures")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    main(given, lambda case: convert(case, given.folder, given.verify_blocks))
