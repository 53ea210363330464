"""Differential saves: what a base checkpoint already holds is linked, not written again.

    step-0000100/  rank-00000.safetensors  [a b c d e f]                  first save: everything
    step-0000200/  rank-00000.safetensors  [A B C D]                      a to d changed
                   rank-00000-still.safetensors  [e f]                    unchanged, put apart
    step-0000300/  rank-00000.safetensors  [A' B' C' D']
                   from-0000200.rank-00000-still.safetensors              a hard link: nothing written

A checkpoint stays self-contained: every byte it needs lies in its own folder, partly under a hard link. So any
checkpoint can be deleted, moved or copied without a look at the others; the file system keeps a shared file as long as
a folder names it. There is no base to protect, no chain to replay when restoring, and retention is plain deletion.

What is equal is found chunk by chunk (`codec.py`): same tensor, same hash of the content, whoever cut it. A chunk is a
few MiB from the start of a rank's piece, so after a change of layout most chunks count as new, once.

**The waste is bounded.** A link keeps a whole file alive, also its bytes that nobody needs any more. A file is linked
only if at least `MIN_USED` of it is still in use; else its unchanged chunks are written again, into a file of their own
(`still`): they did not change once and likely will not soon, so next time that file is linked whole. Hence a checkpoint
never occupies more than 1 / MIN_USED = 1.25 times its logical size, and parts that do not change are written twice, not
every time. Two generations, as in a garbage collector.

**The risk is bounded.** One bad block in a shared file spoils every checkpoint that links it. So a file is read back
and its checksum compared before a new checkpoint relies on it; a damaged one is not linked, its content being in memory
and written anew. After `max_age` saves a sound one is written anew as well.

Dense training changes nearly every number at every step: then nothing is linked, no piece is split (`MIN_STILL`), and
the checkpoint is the plain safetensors file that it is without any of this. Where hard links cannot be made (another
file system, no permission, not supported, too many) the save is full and says why.
"""

from __future__ import annotations

import itertools
import math
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.checkpoint import catalog
from megalite.checkpoint.codec import CHUNK_BYTES, ITEM_BYTES
from megalite.checkpoint.format import Extent, FileRecord, Piece, read_manifest
from megalite.checkpoint.reader import damage
from megalite.checkpoint.tensor_file import offsets
from megalite.errors import CheckpointError

LINK_PREFIX = "from-"
"""Linked files are called from-STEP.NAME after the checkpoint that wrote them."""

TRIAL = ".link-"

MIN_USED = 0.8
"""Share of a file that must still be in use for it to be linked."""
MIN_STILL = 0.02
"""Share of a rank's bytes that must be unchanged for a file of their own to pay."""


@dataclass(frozen=True)
class Storage:
    """How a checkpoint's tensors are stored. The default is full, plain safetensors files."""

    differential: bool = False
    """Link what a base checkpoint already holds; and hash all chunks, for the next save to compare with."""
    compress: bool = False
    """Pack the chunks without loss: smaller, slower, and not safetensors any more."""
    max_age: int = 8
    """Saves that may link a file before it is written anew."""
    chunk_bytes: int = CHUNK_BYTES
    """Size of what is compared and packed; a multiple of 4."""


class Base:
    """The chunks of some tensors of an older checkpoint, by place and by content."""

    def __init__(self, folder: Path, names: Iterable[str]):
        """Open a checkpoint for what it has of the tensors `names`.

        Raises:
            CheckpointError: it is damaged.
        """
        self.folder = folder
        manifest = read_manifest(folder)
        self._step = manifest.progress.step
        self.files: dict[str, FileRecord] = manifest.files
        self._at: dict[tuple[object, ...], tuple[str, Extent]] = {}
        self._of: dict[tuple[str, str], Extent] = {}
        self._offsets: dict[str, dict[str, tuple[int, int]]] = {}
        for name in names:
            record = manifest.tensors.get(name)
            for piece in record.pieces if record is not None else ():
                self._add(name, piece)

    @property
    def is_hashed(self) -> bool:
        """Whether it was saved with hashes of its chunks."""
        return bool(self._at)

    def find(self, name: str, piece: Piece, index: int) -> Extent | None:
        """Where the base holds the content of a piece's chunk; at the same place if it can be."""
        chunk = piece.chunks[index]
        found = self._at.get((name, piece.start, piece.shape, piece.chunk_bytes, index))
        return found[1] if found is not None and found[0] == chunk else self._of.get((name, chunk))

    def link_name(self, file: str) -> str:
        """What a file of the base is called where it is linked."""
        return file if file.startswith(LINK_PREFIX) else f"{LINK_PREFIX}{self._step:07d}.{file}"

    def link(self, file: str, folder: Path) -> None:
        """Hard-link a file of the base into a new checkpoint's folder, and read it back.

        Raises:
            OSError: it cannot be linked, or the file is not what the base's manifest says.
        """
        source, target = self.folder / file, folder / self.link_name(file)
        trial = folder / f"{TRIAL}{uuid.uuid4().hex}"  # another rank may link the same file; its name must be good
        os.link(source, trial)
        try:
            if problem := damage(trial, self.files[file]):
                raise OSError(problem.replace(str(trial), str(source)))
            try:
                os.link(trial, target)
            except FileExistsError:
                if not os.path.samefile(trial, target):
                    raise
        finally:
            trial.unlink()

    def _add(self, name: str, piece: Piece) -> None:
        for index, (chunk, extent) in enumerate(zip(piece.chunks, self._extents(piece), strict=True)):
            self._at[name, piece.start, piece.shape, piece.chunk_bytes, index] = chunk, extent
            self._of.setdefault((name, chunk), extent)

    def _extents(self, piece: Piece) -> Iterator[Extent]:
        """Where each chunk of a piece lies."""
        if not piece.chunks:
            return
        extents = piece.extents or (self._whole(piece),)
        for extent in extents:
            if extent.codec:  # packed chunk by chunk
                yield extent
                continue
            for start in range(0, extent.num_bytes, piece.chunk_bytes):
                size = min(piece.chunk_bytes, extent.num_bytes - start)
                yield Extent(extent.file, extent.offset + start, size, size)

    def _whole(self, piece: Piece) -> Extent:
        """A plain piece as one extent."""
        if piece.file not in self._offsets:
            self._offsets[piece.file] = offsets(self.folder / piece.file)
        if piece.key not in self._offsets[piece.file]:
            raise CheckpointError(f"{self.folder / piece.file}: has no {piece.key}")
        start, size = self._offsets[piece.file][piece.key]
        return Extent(piece.file, start, size, size)


@dataclass
class Matches:
    """What is known of a rank's chunks: for each piece, by key, one entry a chunk."""

    linked: dict[str, list[Extent | None]]
    """Where the chunk lies in the new folder, under a link; None if it must be written."""
    apart: dict[str, list[bool]]
    """Whether it must be written, but into the file of what does not change."""
    files: dict[str, FileRecord]
    """The linked files, by their new names."""
    note: str = ""
    """For people: why nothing is linked, or less than could be."""


def find_base(root: Path, step: int) -> Path | None:
    """The newest complete checkpoint before a step, to save that step against."""
    older = [folder for folder in catalog.complete(root) if catalog.step_of(folder) < step]
    return older[-1] if older else None


def match(folder: Path, pieces: dict[str, list[Piece]], base_folder: Path | None, storage: Storage) -> Matches:
    """Compare hashed pieces with a base, and link its files that are worth it into the new checkpoint's folder."""
    num_chunks = {piece.key: len(piece.chunks) for parts in pieces.values() for piece in parts}
    full = Matches({key: [None] * n for key, n in num_chunks.items()}, _nowhere(num_chunks), {})
    if base_folder is None:
        return replace(full, note="there is no older checkpoint")
    try:
        base = Base(base_folder, pieces)
    except CheckpointError as error:
        return replace(full, note=str(error))
    if not base.is_hashed:
        return replace(full, note=f"{base_folder.name} has no hashes of these tensors' chunks")
    found = {
        piece.key: [base.find(name, piece, index) for index in range(len(piece.chunks))]
        for name, parts in pieces.items()
        for piece in parts
    }
    files, failure = _link_worthwhile(base, folder, _used_bytes(found), storage.max_age)
    linked = {key: [_renamed(extent, base, files) for extent in extents] for key, extents in found.items()}
    if failure is not None:
        return Matches(linked, full.apart, files, f"could not be linked: {failure}")
    apart = {key: [e is not None and f is None for e, f in zip(found[key], linked[key], strict=True)] for key in found}
    if _apart_bytes(apart, pieces) < MIN_STILL * _total_bytes(pieces):
        return Matches(linked, full.apart, files, "" if files else f"too little of {base_folder.name} is unchanged")
    return Matches(linked, apart, files, "" if files else "what is unchanged was put apart, to be linked from now on")


def _nowhere(num_chunks: dict[str, int]) -> dict[str, list[bool]]:
    return {key: [False] * count for key, count in num_chunks.items()}


def _total_bytes(pieces: dict[str, list[Piece]]) -> int:
    return sum(ITEM_BYTES * math.prod(piece.shape) for parts in pieces.values() for piece in parts)


def _apart_bytes(apart: dict[str, list[bool]], pieces: dict[str, list[Piece]]) -> int:
    total = 0
    for parts in pieces.values():
        for piece in parts:
            num_bytes = ITEM_BYTES * math.prod(piece.shape)
            for index in itertools.compress(itertools.count(), apart[piece.key]):
                total += min(piece.chunk_bytes, num_bytes - index * piece.chunk_bytes)
    return total


def _used_bytes(found: dict[str, list[Extent | None]]) -> dict[str, int]:
    """How many bytes of each file of the base are wanted; a place that is wanted twice counts once."""
    places = {
        (extent.file, extent.offset): extent.stored_bytes for extents in found.values() for extent in extents if extent
    }
    used: dict[str, int] = {}
    for (file, _), size in places.items():
        used[file] = used.get(file, 0) + size
    return used


def _link_worthwhile(
    base: Base, folder: Path, used: dict[str, int], max_age: int
) -> tuple[dict[str, FileRecord], OSError | None]:
    """Link the files that are young and in use enough; what is linked, and the last thing that went wrong."""
    linked: dict[str, FileRecord] = {}
    failure: OSError | None = None
    for file, num_bytes in sorted(used.items()):
        record = base.files[file]
        if num_bytes < MIN_USED * record.bytes or record.age >= max_age:
            continue
        try:
            base.link(file, folder)
        except OSError as error:
            failure = error
            continue
        linked[base.link_name(file)] = replace(record, age=record.age + 1)
    return linked, failure


def _renamed(extent: Extent | None, base: Base, files: dict[str, FileRecord]) -> Extent | None:
    """The extent under the link's name; None if its file was not linked."""
    if extent is None or base.link_name(extent.file) not in files:
        return None
    return replace(extent, file=base.link_name(extent.file))
