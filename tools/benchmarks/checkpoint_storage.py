"""What differential and compressed checkpoints save, and what they cost: the figures of docs/checkpoints.md.

    python tools/benchmarks/checkpoint_storage.py changes RUN      what changed between a run's checkpoints
    python tools/benchmarks/checkpoint_storage.py packing RUN      what packing makes of its last one
    python tools/benchmarks/checkpoint_storage.py saving --mb 600  bytes and seconds of each way to save

Times are CPU seconds of this process, the least of some tries, writing to the page cache and syncing included, so that
a busy machine changes them little; the disk's own time is not in them.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import zstandard
from arguments import count, existing, folder

from megalite.checkpoint.catalog import complete
from megalite.checkpoint.codec import CHUNK_BYTES, ITEM_BYTES, hash_chunks, pack
from megalite.checkpoint.differential import Storage
from megalite.checkpoint.format import Manifest, Piece, Progress, folder_name, write_manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.shares import WrittenShare, file_name, take_shares, write_share
from megalite.config.optimizers import RULES

KINDS = ("weight", *RULES["adamw"].state)

CHUNK_SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "4 MiB": CHUNK_BYTES}
TENSORS = 24
"""Of equal size, in the made-up state of `saving`."""
TRIES = 5


def changes(run: Path) -> None:
    """Share of the bytes that are equal in consecutive checkpoints: number by number, and in whole chunks."""
    folders = complete(run)
    print(f"{'checkpoint':14} {'kind':12} {'numbers':>9} " + " ".join(f"{name:>9}" for name in CHUNK_SIZES))
    for older, newer in pairwise(folders):
        readers = CheckpointReader(older), CheckpointReader(newer)
        for kind in KINDS:
            pairs = [
                tuple(map(bytes_of, readers, (name, name))) for name in readers[1].manifest.tensors if of(kind, name)
            ]
            total = sum(len(new) for _, new in pairs)
            numbers = sum(ITEM_BYTES * int((a.view(np.int32) == b.view(np.int32)).sum()) for a, b in pairs)
            chunks = [sum(equal_bytes(a, b, size) for a, b in pairs) for size in CHUNK_SIZES.values()]
            shares = " ".join(f"{count / total:9.2%}" for count in (numbers, *chunks))
            print(f"{newer.name:14} {kind:12} {shares}")


def of(kind: str, name: str) -> bool:
    return name.startswith(f"{kind}/")


def bytes_of(reader: CheckpointReader, name: str) -> np.ndarray:
    return torch.cat(list(reader.slabs(name))).numpy().reshape(-1).view(np.uint8)


def equal_bytes(a: np.ndarray, b: np.ndarray, size: int) -> int:
    """Bytes in chunks that are equal in both."""
    pairs = zip(hash_chunks(a, size), hash_chunks(b, size), strict=True)
    return sum(min(size, len(a) - index * size) for index, (left, right) in enumerate(pairs) if left == right)


def packing(run: Path) -> None:
    """Packed size over plain size, and speed, of the newest checkpoint's kinds."""
    reader = CheckpointReader(complete(run)[-1])
    ways: dict[str, Callable[[np.ndarray], int]] = {
        "shuffled, level 1": lambda chunk: len(pack(chunk)[0]),
        "plain, level 1": lambda chunk: len(zstandard.ZstdCompressor(level=1).compress(chunk)),
        "plain, level 3": lambda chunk: len(zstandard.ZstdCompressor(level=3).compress(chunk)),
    }
    for kind in KINDS:
        data = np.concatenate([bytes_of(reader, name) for name in reader.manifest.tensors if of(kind, name)])
        chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        for name, way in ways.items():
            start = time.process_time()
            size = sum(map(way, chunks))
            speed = len(data) / (time.process_time() - start) / 1e6
            print(f"{kind:12} {name:18} {size / len(data):.3f} of {len(data) / 1e6:.1f} MB at {speed:,.0f} MB/s")


def saving(mb: int, parent: Path | None) -> None:
    """Saves as one rank, from the third on, of a state of which nothing, half or all stands still."""
    torch.manual_seed(0)
    numbers = mb * 10**6 // ITEM_BYTES // TENSORS
    first = {f"weight/t{index}": torch.randn(numbers // 1000, 1000) * 0.02 for index in range(TENSORS)}
    ways = {
        "full": Storage(),
        "differential": Storage(differential=True),
        "compressed": Storage(compress=True),
        "both": Storage(differential=True, compress=True),
    }
    for still in (0, TENSORS // 2, TENSORS):
        for way, storage in ways.items():
            with tempfile.TemporaryDirectory(dir=parent) as root:
                state, base, seconds = dict(first), None, []
                for step in range(1, 3 + TRIES):
                    start = time.process_time()
                    older, (base, written) = base, save(Path(root), step, state, base, storage)
                    seconds.append(time.process_time() - start)
                    if older is not None:
                        shutil.rmtree(older)
                    for name in list(state)[still:]:
                        state[name] = state[name] * 1.001
            share = f"{still / TENSORS:.0%} still"
            print(
                f"{share:11} {way:13} {written.bytes_written / 1e6:7.1f} MB written, {min(seconds[2:]):.2f} CPU seconds"
            )


def save(root: Path, step: int, state: dict, base: Path | None, storage: Storage) -> tuple[Path, WrittenShare]:
    """Write a checkpoint as one rank does."""
    folder = root / folder_name(step)
    folder.mkdir()
    pieces = {name: [Piece(file_name(0), name, (0, 0), tuple(tensor.shape))] for name, tensor in state.items()}
    written = write_share(folder, 0, state, pieces, base=base, storage=storage)
    files, tensors = take_shares(folder)
    write_manifest(folder, Manifest(Progress(step=step), {}, {}, tensors, files))
    return folder, written


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("changes", "packing"):
        commands.add_parser(name).add_argument("run", type=existing)
    options = commands.add_parser("saving")
    options.add_argument("--mb", type=count, default=600)
    options.add_argument("--folder", type=folder, help="where to write; the disk to measure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "saving":
        if arguments.folder is not None and shutil.disk_usage(arguments.folder).free < 4 * arguments.mb * 10**6:
            parser.error(f"{arguments.folder}: less than {4 * arguments.mb} MB free")
        saving(arguments.mb, arguments.folder)
    else:
        {"changes": changes, "packing": packing}[arguments.command](arguments.run)


if __name__ == "__main__":
    main()
