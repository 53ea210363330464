"""Whether data is what was written, to the last byte: `megalite data verify`, and `data.verify: true` before training.

    folder of a station   every file against the hashes in its manifest; the numbers in indices; what it was made of
    Megatron-LM pair      sizes, every number of the index, every token: it brings no hashes
    training config       all that a run will read of these

What is to be looked at is a list of independent checks of some hundred MB each, so threads of a process, or the ranks
of a run, share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megalite.config.schema import Config
from megalite.data.indexed import IndexedTokens, bin_path, idx_path
from megalite.data.layout import COLUMNS, PackedLayout
from megalite.data.ranking import damage_of_ranks, has_record
from megalite.data.sources import TOKENS_NAME, files_of_tokens, is_pair, pair_prefix, tokenizer_of, what_is_wrong_with
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.hashes import CHUNK_BYTES, hash_file
from megalite.stations.manifest import FILE_NAME, Output, StationManifest, find_manifest, missing_outputs
from megalite.stations.tasks import WORK_FOLDER
from megalite.tokenizer.tokenizer import fingerprint_files

MAX_THREADS = 8

TOKENS_AT_ONCE = 1 << 24

UNFINISHED = (".partial", ".old")


@dataclass(frozen=True)
class FileCheck:
    """Something to look at, by whom and when does not matter."""

    num_bytes: int
    """That are read."""
    complaint: Callable[[], str]
    """Looks, and says what is wrong; empty when nothing is."""


@dataclass
class CheckPlan:
    """What there is to look at."""

    checks: list[FileCheck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is wrong at first sight."""
    notes: list[str] = field(default_factory=list)
    """What cannot be checked, or is no harm."""
    names: list[str] = field(default_factory=list)
    """Folders and pairs."""

    @property
    def num_bytes(self) -> int:
        """That all checks read."""
        return sum(check.num_bytes for check in self.checks)

    def share(self, number: int, count: int) -> list[FileCheck]:
        """The checks of one of `count` processes, which read about as much each."""
        return sorted(self.checks, key=lambda check: -check.num_bytes)[number::count]


def list_path(path: Path) -> CheckPlan:
    """What there is to look at in a folder of a station or of a recipe, or in a Megatron pair.

    Raises:
        DataError: it is none of these.
    """
    lister = _CheckPlanner()
    if path.is_dir():
        folders = [path] if (path / FILE_NAME).is_file() else sorted(_stations_below(path))
        if not folders:
            raise DataError(f"{path}: nothing to verify: no {FILE_NAME} in it or below, as stations of data leave it")
        for folder in folders:
            lister.add_folder(folder, None)
        if folders != [path]:
            lister.add_strangers(path, folders)
    elif is_pair(path):
        lister.add_pair(pair_prefix(path), None)
    else:
        raise DataError(
            f"{path}: no such folder, nor a pair {path.name}.bin and {path.name}.idx; name a folder of a station or of "
            "a recipe, the prefix of a Megatron pair, or a training config"
        )
    return lister.listing


def list_run(config: Config, vocab_size: int | None = None) -> CheckPlan:
    """What there is to look at of the data that a run will read.

    Args:
        config: of the run.
        vocab_size: of the model: tokens of pairs without hashes are held against it.
    """
    lister = _CheckPlanner()
    later = (source for stage in config.batch.stages for source in stage.train)
    for source in (*config.data.train, *later, *config.data.valid):
        if source.path.is_dir():
            lister.add_folder(source.path, vocab_size, only_read=True)
        elif is_pair(source.path):
            lister.add_pair(pair_prefix(source.path), vocab_size)
        else:
            lister.listing.problems.append(what_is_wrong_with(source.path))
    for path in config.data.mix.ranks.values():
        lister.add_ranks(path)
    return lister.listing


def complaints(checks: Sequence[FileCheck], *, threads: int, progress: ProgressReporter | None = None) -> Iterator[str]:
    """Look at everything; yield what is wrong.

    Args:
        checks: what to look at.
        threads: of this process.
        progress: told of the megabytes that were read.
    """
    progress = progress or NoProgress()
    with ThreadPoolExecutor(max(1, min(threads, MAX_THREADS))) as pool:
        for check, found in zip(checks, pool.map(lambda check: check.complaint(), checks), strict=True):
            progress.advance(check.num_bytes / 1e6)
            if found:
                yield found


def refuse(problems: Iterable[str], listing: CheckPlan) -> None:
    """Raise an error that names all that is wrong, if anything is.

    Raises:
        DataError: there are problems.
    """
    problems = list(dict.fromkeys([*listing.problems, *problems]))  # several folders may need the same one
    if problems:
        title = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} found by verifying the data:"
        raise DataError("\n".join([title, *(f"  - {problem}" for problem in problems)]))


class _CheckPlanner:
    """Puts a listing together; what several sources share is in it once."""

    def __init__(self) -> None:
        self.listing = CheckPlan()
        self._known: set[Path] = set()

    def add_folder(self, folder: Path, vocab_size: int | None, *, only_read: bool = False) -> None:
        """A station's folder, and what it needs to be read.

        Args:
            folder: the folder.
            vocab_size: of the model, if there is one.
            only_read: leave files out that training does not read.
        """
        if not self._is_new(folder):
            return
        try:
            manifest = find_manifest(folder)
        except DataError as error:
            self.listing.problems.append(str(error))
            return
        if manifest is None:
            self.listing.problems.append(f"{folder}: no {FILE_NAME}; not a folder that a station left")
            return
        names = {"pack": tuple(COLUMNS), "tokenize": files_of_tokens(manifest)}
        read = names.get(manifest.station, ()) if only_read else None
        self._add_files(manifest, read)
        if manifest.station == "pack":
            self._add_packed(manifest, vocab_size, only_read)
        elif manifest.station == "tokenize":
            self._check_later(idx_path(folder / TOKENS_NAME), partial(_index_complaint, folder / TOKENS_NAME))
            self._compare_tokenizer(manifest)

    def add_pair(self, prefix: Path, vocab_size: int | None) -> None:
        """A Megatron pair without a manifest."""
        if not self._is_new(prefix):
            return
        self.listing.notes.append(
            f"{prefix}: no checksums in this set (it has no {FILE_NAME}): a token that became another one of the "
            "vocabulary cannot be told"
        )
        try:
            tokens = IndexedTokens(prefix)
        except DataError as error:
            self.listing.problems.append(str(error))
            return
        self._check_later(idx_path(prefix), partial(_index_complaint, prefix))
        for first in range(0, tokens.num_tokens, TOKENS_AT_ONCE):
            stop = min(first + TOKENS_AT_ONCE, tokens.num_tokens)
            check = partial(_tokens_complaint, tokens, first, stop, vocab_size)
            self.listing.checks.append(FileCheck((stop - first) * tokens.dtype.itemsize, check))

    def add_ranks(self, path: Path) -> None:
        """An order of samples."""
        if self._is_new(path):
            if not has_record(path):
                self.listing.notes.append(f"{path}: no checksum beside it: another order cannot be told from it")
            self._check_later(path, partial(damage_of_ranks, path))

    def add_strangers(self, root: Path, stations: Sequence[Path]) -> None:
        """What lies in a recipe's folder, and in none of its stations: pairs, or a station that lost its manifest."""
        lost: dict[Path, list[Path]] = {}
        for path in sorted(_leaves_below(root)):
            if any(path.is_relative_to(station) for station in stations):
                continue
            if path.is_dir():
                lost[path] = []
            elif path.suffix in (".bin", ".idx") and path.stem != TOKENS_NAME:
                self.add_pair(pair_prefix(path), None)
            else:
                lost.setdefault(path.parent, []).append(path)
        for folder, paths in lost.items():
            names = _listed(path.name for path in paths) or "it is empty"
            if folder == root:
                self.listing.notes.append(f"{root}: of no station, and not checked: {names}")
            else:
                self.listing.problems.append(
                    f"{folder}: no {FILE_NAME}, so it cannot be checked ({names}); run its station again, or move what "
                    "no station has made elsewhere"
                )

    def _is_new(self, path: Path) -> bool:
        known, path = path.resolve() in self._known, path.resolve()
        if not known:
            self._known.add(path)
            self.listing.names.append(str(path))
        return not known

    def _add_files(self, manifest: StationManifest, names: Sequence[str] | None) -> None:
        if missing := missing_outputs(manifest):
            self.listing.problems.append(f"{manifest.folder}: {'; '.join(missing)}; run its station again")
        absent = {complaint.split(": ")[0] for complaint in missing}
        for output in manifest.outputs:
            if (names is None or output.path in names) and output.path not in absent:
                self.listing.checks += _file_checks(manifest.folder / output.path, output)
        if manifest.format == 1:
            self.listing.notes.append(
                f"{manifest.folder}: no checksum in its {FILE_NAME} (made before format 2): its files were checked, "
                "what it says of settings and counts was not"
            )
        if names is None:
            self._note_strangers(manifest)

    def _note_strangers(self, manifest: StationManifest) -> None:
        named = {output.path for output in manifest.outputs} | {FILE_NAME}
        found = {path.relative_to(manifest.folder) for path in manifest.folder.rglob("*") if path.is_file()}
        strange = sorted(path.as_posix() for path in found if WORK_FOLDER not in path.parts)
        strange = [name for name in strange if name not in named]
        if strange:
            self.listing.notes.append(f"{manifest.folder}: not of this station, and not checked: {_listed(strange)}")

    def _add_packed(self, manifest: StationManifest, vocab_size: int | None, only_read: bool) -> None:
        """What a cut belongs to, and whether it fits."""
        path = manifest.input_path()
        if path.is_dir():
            self.add_folder(path, vocab_size, only_read=only_read)
            try:
                read = find_manifest(path)
            except DataError:
                return  # told already
            if read is not None and read.fingerprint != manifest.inputs[0].fingerprint:
                self.listing.problems.append(
                    f"{manifest.folder}: {path} has changed since it was packed; run `megalite data pack` again"
                )
            prefix = path / TOKENS_NAME
        else:
            self.add_pair(pair_prefix(path), vocab_size)
            prefix = pair_prefix(path)
        if manifest.settings["method"] == "best_fit":
            num_bytes = sum(output.num_bytes for output in manifest.outputs)
            self.listing.checks.append(FileCheck(num_bytes, partial(_cut_complaint, manifest, prefix)))

    def _compare_tokenizer(self, manifest: StationManifest) -> None:
        record = tokenizer_of(manifest)
        if not record.folder.is_dir():
            self.listing.notes.append(f"{manifest.folder}: its tokenizer {record.folder} is not there")
        elif fingerprint_files(record.folder) != record.fingerprint:
            self.listing.problems.append(
                f"{record.folder}: not the tokenizer that {manifest.folder} was made with; put that one back"
            )

    def _check_later(self, path: Path, complaint: Callable[[], str]) -> None:
        num_bytes = path.stat().st_size if path.is_file() else 0
        self.listing.checks.append(FileCheck(num_bytes, complaint))


def _stations_below(folder: Path) -> Iterator[Path]:
    return (path.parent for path in _leaves_below(folder) if path.name == FILE_NAME)


def _leaves_below(folder: Path) -> Iterator[Path]:
    """Files and empty folders that are no unfinished work, and not hidden."""
    for path in folder.rglob("*"):
        *parts, name = path.relative_to(folder).parts
        is_ours = not any(part.endswith(UNFINISHED) or part == WORK_FOLDER for part in parts)
        if is_ours and not name.startswith(".") and (path.is_file() or not any(path.iterdir())):
            yield path


def _listed(names: Iterable[str]) -> str:
    """The first few of many."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _file_checks(path: Path, output: Output) -> Iterator[FileCheck]:
    """A file in its stretches, as far as they have hashes of their own."""
    for number, expected in enumerate(output.chunks):
        start, stop = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, output.num_bytes)
        yield FileCheck(stop - start, partial(_hash_complaint, path, start, stop, expected))
    if not output.chunks:
        yield FileCheck(output.num_bytes, partial(_hash_complaint, path, 0, output.num_bytes, output.xxh3))


def _hash_complaint(path: Path, start: int, stop: int, expected: str) -> str:
    try:
        if hash_file(path, start, stop) == expected:
            return ""
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror}); see to the disk"
    where = f" between bytes {start} and {stop}" if start else ""
    return f"{path}: its contents have changed{where}; copy it from where it is whole, or run its station again"


def _index_complaint(prefix: Path) -> str:
    try:
        damage = IndexedTokens(prefix).damage()
    except DataError as error:
        return str(error)
    return damage and f"{idx_path(prefix)}: damaged index: {damage}; copy or make the pair again"


def _tokens_complaint(tokens: IndexedTokens, start: int, stop: int, vocab_size: int | None) -> str:
    part = tokens.read(start, stop)
    smallest, largest = int(part.min()), int(part.max())
    if smallest >= 0 and (vocab_size is None or largest < vocab_size):
        return ""
    wrong, last = (smallest if smallest < 0 else largest), "" if vocab_size is None else f" to {vocab_size - 1}"
    place = bin_path(tokens.prefix)
    return f"{place}: token {wrong} found among tokens {start} to {stop}, expected 0{last or ' or more'}"


def _cut_complaint(manifest: StationManifest, prefix: Path) -> str:
    try:
        damage = PackedLayout(manifest.folder).damage(IndexedTokens(prefix), manifest)
    except DataError as error:
        return str(error)
    return damage and f"{manifest.folder}: damaged: {damage}; run `megalite data pack` again"
