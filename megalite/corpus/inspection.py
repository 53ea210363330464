"""What a station of documents kept and what it put aside: counts by reason, and random examples of each.

    part-*.parquet      kept
    rejected/*.parquet  rejected: text and reason      -> every row gets a random number; the rows with the smallest
    removed/*.parquet   removed: name and reason          ones of each reason are the examples
    clusters/*.parquet  removed by `dedup`: what each repeats

A fair choice from a stream takes one pass and remembers only the examples (Efraimidis and Spirakis 2006, with equal
weights). The random numbers depend on the seed alone, so the same command shows the same documents again. Of the kept
documents nothing but file footers is read, and then the row groups of the examples.

Removed documents have left no text. It is looked up in the folder of the station before, where that still holds what
this station read: part N of it became part N here, so one file has to be opened for an example.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megalite.corpus.documents import ARROW_TYPE, REJECTED_FOLDER
from megalite.corpus.reading.files import reading_station_file
from megalite.corpus.stations.dedup import CLUSTERS_FOLDER
from megalite.corpus.stations.filtering import REMOVED_FOLDER
from megalite.errors import DataError, did_you_mean
from megalite.stations.facts import DOCUMENT_STATIONS
from megalite.stations.manifest import StationManifest, check_sampled_bytes, find_manifest, missing_outputs

Fate = Literal["kept", "rejected", "removed"]

KEPT = "kept"

DUPLICATE = "duplicate"
"""Reason of what `dedup` removes."""

FOLDERS: dict[Fate, tuple[str, ...]] = {
    "kept": (".",),
    "rejected": (REJECTED_FOLDER,),
    "removed": (REMOVED_FOLDER, CLUSTERS_FOLDER),
}
"""Where in a station's folder the documents of each fate lie."""

CLUSTER_COLUMNS = {"id": "removed_id", "source": "removed_source", "detail": "kept_id"}
"""Names in clusters/ of what removed/ has too."""


@dataclass(frozen=True)
class Example:
    """One document."""

    id: str
    source: str
    text: str | None = None
    """None where a removed document's text is not there any more."""
    detail: str = ""
    """What a removed document repeats, or its score."""
    has_namesakes: bool = False
    """Whether a removed document's text is left out because several have its id, with other texts."""


@dataclass(frozen=True)
class DocumentGroup:
    """The documents of a station that were kept, or that went for one reason."""

    fate: Fate
    reason: str
    """KEPT for the kept ones."""
    documents: int
    text_bytes: int | None
    """Bytes of their texts; None where they are not known without reading everything."""
    examples: tuple[Example, ...]
    """In the order of the corpus."""


@dataclass(frozen=True)
class Inspection:
    """What became of the documents of one station."""

    folder: Path
    station: str
    text_bytes_in: int | None
    """Bytes of the texts that came in, where the manifest says so: some stations cut texts that they keep."""
    groups: tuple[DocumentGroup, ...]
    """The kept ones first, then by falling number of documents."""

    @property
    def documents_in(self) -> int:
        """Documents of all groups."""
        return sum(group.documents for group in self.groups)


@dataclass(frozen=True)
class Wanted:
    """Which examples to choose."""

    num: int = 3
    """Of each group at most."""
    seed: int = 0
    reason: str | None = None
    """Only of groups whose reason has this in it, in any case of letters; "kept" for the kept ones."""
    source: str | None = None
    """Look at the documents of this source only; counts too."""

    def shows(self, reason: str) -> bool:
        """Whether examples of this reason are wanted."""
        return self.reason is None or self.reason.lower() in reason.lower()


def inspect(folder: Path, wanted: Wanted) -> list[Inspection]:
    """Count and show what stations did.

    Args:
        folder: of one station, or the `out` folder of a recipe, whose stations come in their order.
        wanted: which examples.

    Raises:
        DataError: it is neither, files are missing or damaged, or no document has such a source or reason.
    """
    stations = find_stations(folder)
    for manifest in stations:
        check_sampled_bytes(
            manifest, [part.path.relative_to(manifest.folder).as_posix() for part in _all_parts(manifest)]
        )
    scans = [_Scan(manifest, wanted) for manifest in stations]
    _refuse_unknown(folder, wanted, scans)
    return [scan.inspection() for scan in scans]


def find_stations(folder: Path) -> list[StationManifest]:
    """The stations of documents in a folder: itself, or those right below it, each after those that it read.

    Raises:
        DataError: there is none, or one has lost files.
    """
    own = find_manifest(folder)
    if own is not None and own.station not in DOCUMENT_STATIONS:
        raise DataError(
            f"{folder}: made by station {own.station!r}; there are documents to look at in the folders of "
            f"{', '.join(DOCUMENT_STATIONS)}"
        )
    below = sorted(folder.iterdir()) if own is None and folder.is_dir() else []
    found = [own] if own else [manifest for path in below if (manifest := _document_station(path))]
    if not found:
        what = "no station of documents in it" if folder.is_dir() else "no such folder"
        raise DataError(
            f"{folder}: {what}; expected the folder of a finished station ({', '.join(DOCUMENT_STATIONS)}) or the "
            "`out` folder of a recipe"
        )
    for manifest in found:
        if problems := missing_outputs(manifest):
            complaints = "; ".join(problems)
            raise DataError(
                f"{manifest.folder}: does not agree with its manifest.json: {complaints}; run its station again"
            )
    return sorted(found, key=lambda manifest: (_depth(manifest), DOCUMENT_STATIONS.index(manifest.station)))


def _document_station(folder: Path) -> StationManifest | None:
    manifest = find_manifest(folder) if folder.suffix not in (".partial", ".old") else None
    return manifest if manifest is not None and manifest.station in DOCUMENT_STATIONS else None


def _depth(manifest: StationManifest) -> int:
    """How many stations of documents stand before this one."""
    paths = [manifest.input_path(index) for index in range(len(manifest.inputs))]
    before = [found for path in paths if path != manifest.folder and (found := _document_station(path))]
    return 1 + max(map(_depth, before), default=-1)


class _PartFile(NamedTuple):
    """One Parquet file of a station."""

    fate: Fate
    path: Path

    @property
    def number(self) -> int:
        """Of the task that wrote it, from part-00012.parquet."""
        return int(self.path.stem.removeprefix("part-"))

    @property
    def only_reason(self) -> str:
        """Reason of all its documents, where they have no column for it."""
        return KEPT if self.fate == "kept" else DUPLICATE

    def read(self, file: pq.ParquetFile, group: int, names: Sequence[str]) -> pa.Table:
        """Columns of a row group by the names of removed/, also from clusters/; those it has not are left out."""
        renamed = CLUSTER_COLUMNS if self.path.parent.name == CLUSTERS_FOLDER else {}
        in_file = {name: renamed.get(name, name) for name in names}
        there = [name for name in names if in_file[name] in file.schema_arrow.names]
        table = file.read_row_group(group, columns=[in_file[name] for name in there], use_threads=False)
        return table.rename_columns(there)


class _RowPlace(NamedTuple):
    """Where a row lies; places sort in the order of the corpus."""

    part: int
    group: int
    row: int


@dataclass
class _GroupTally:
    """A group after the pass: its counts, and the rows with the smallest random numbers."""

    fate: Fate
    reason: str
    num_wanted: int
    documents: int = 0
    text_bytes: int | None = None
    best: list[tuple[float, _RowPlace]] = field(default_factory=list)

    def offer(self, part: int, group: int, rows: np.ndarray, lots: np.ndarray) -> None:
        """Count rows of a row group, and keep those with the smallest numbers so far.

        Args:
            part: index of the file.
            group: number of the row group.
            rows: int64 [rows], their numbers in the row group.
            lots: float64 [rows], their random numbers.
        """
        self.documents += rows.size
        smallest = np.argsort(lots, kind="stable")[: self.num_wanted]
        new = ((float(lots[i]), _RowPlace(part, group, int(rows[i]))) for i in smallest)
        self.best = sorted([*self.best, *new])[: self.num_wanted]

    def places(self) -> list[_RowPlace]:
        """The chosen rows."""
        return [place for _, place in self.best]


class _Scan:
    """One pass over the files of a station.

    Args:
        manifest: of the station.
        wanted: which examples.
    """

    def __init__(self, manifest: StationManifest, wanted: Wanted):
        self.manifest = manifest
        self.parts = _all_parts(manifest)
        self.tallies = {("kept", KEPT): _GroupTally("kept", KEPT, wanted.num)}
        self.sources: set[str] = set()
        """Names that were met; only with wanted.source."""
        self._wanted = wanted
        rng = np.random.default_rng(wanted.seed)
        for index, part in enumerate(self.parts):
            with reading_station_file(part.path), pq.ParquetFile(part.path) as file:
                for group in range(file.num_row_groups):
                    lots = rng.random(file.metadata.row_group(group).num_rows)
                    self._count(index, file, group, lots)
        if wanted.source is None:
            self.tallies["kept", KEPT].text_bytes = manifest.counts["text_bytes"]

    def _count(self, index: int, file: pq.ParquetFile, group: int, lots: np.ndarray) -> None:
        part, source = self.parts[index], self._wanted.source
        names = [] if source is None else ["source"]
        names += {"kept": [], "rejected": ["reason", "text"], "removed": ["reason"]}[part.fate]
        columns = part.read(file, group, names)
        rows = np.arange(lots.size)
        if source is not None:
            self.sources.update(pc.unique(columns["source"]).to_pylist())
            rows = np.flatnonzero(pc.equal(columns["source"], source).to_numpy())
        for reason, chosen in _by_reason(columns, rows, part.only_reason):
            tally = self.tallies.setdefault((part.fate, reason), _GroupTally(part.fate, reason, self._wanted.num))
            tally.offer(index, group, chosen, lots[chosen])
            if part.fate == "rejected":
                lengths = pc.binary_length(columns["text"]).to_numpy()
                tally.text_bytes = (tally.text_bytes or 0) + int(lengths[chosen].sum())

    def inspection(self) -> Inspection:
        """The counts with the examples, whose rows are read now."""
        tallies = sorted(self.tallies.values(), key=lambda tally: (tally.fate != "kept", -tally.documents))
        shown = [sorted(tally.places()) if self._wanted.shows(tally.reason) else [] for tally in tallies]
        rows = self._read(itertools.chain(*shown))
        groups = []
        for tally, places in zip(tallies, shown, strict=True):
            examples = tuple(rows[place] for place in places)
            groups.append(DocumentGroup(tally.fate, tally.reason, tally.documents, tally.text_bytes, examples))
        text_bytes_in = self.manifest.counts.get("text_bytes_in") if self._wanted.source is None else None
        return Inspection(self.manifest.folder, self.manifest.station, text_bytes_in, tuple(groups))

    def _read(self, places: Iterable[_RowPlace]) -> dict[_RowPlace, Example]:
        """The rows at some places; each row group is read once."""
        examples: dict[_RowPlace, Example] = {}
        for (index, group), together in itertools.groupby(sorted(places), key=lambda place: place[:2]):
            chosen = list(together)
            part = self.parts[index]
            with reading_station_file(part.path), pq.ParquetFile(part.path) as file:
                table = part.read(file, group, ["id", "source", "text", "detail"])
            for place, row in zip(chosen, table.take([place.row for place in chosen]).to_pylist(), strict=True):
                examples[place] = Example(**row)
                if part.path.parent.name == CLUSTERS_FOLDER:
                    examples[place] = replace(examples[place], detail=f"repeats {row['detail']}")
        return examples | self._look_up_texts(examples)

    def _look_up_texts(self, examples: dict[_RowPlace, Example]) -> dict[_RowPlace, Example]:
        """Removed examples with their texts, as far as the station before still has them."""
        inputs = _input_parts(self.manifest)
        missing: dict[int, dict[tuple[str, str], list[_RowPlace]]] = {}
        for place, example in examples.items():
            number = self.parts[place.part].number
            if example.text is None and number < len(inputs):
                missing.setdefault(number, {}).setdefault((example.source, example.id), []).append(place)
        found = {}
        for number, places in missing.items():
            for name, texts in _texts_by_name(inputs[number], places).items():
                text, has_namesakes = (None, True) if len(texts) > 1 else (min(texts), False)
                for place in places[name]:
                    found[place] = replace(examples[place], text=text, has_namesakes=has_namesakes)
        return found


def _all_parts(manifest: StationManifest) -> list[_PartFile]:
    return [part for fate in FOLDERS for part in _parts(manifest, fate)]


def _parts(manifest: StationManifest, fate: Fate) -> list[_PartFile]:
    """The files of documents of one fate, in the order of the corpus."""
    paths = [Path(output.path) for output in manifest.outputs]
    chosen = [path for path in paths if path.parent.as_posix() in FOLDERS[fate] and path.match("part-*.parquet")]
    return [_PartFile(fate, manifest.folder / path) for path in chosen]


def _by_reason(columns: pa.Table, rows: np.ndarray, only_reason: str) -> Iterator[tuple[str, np.ndarray]]:
    """Rows of a row group, parted by their reason."""
    if "reason" not in columns.column_names:
        if rows.size:
            yield only_reason, rows
        return
    coded = columns["reason"].combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy()[rows]
    for code, reason in enumerate(coded.dictionary.to_pylist()):
        if (chosen := rows[codes == code]).size:
            yield reason, chosen


def _input_parts(manifest: StationManifest) -> list[Path]:
    """The files that a station read, by the numbers of those it wrote: as long as they are stations', unchanged."""
    paths: list[Path] = []
    for index, recorded in enumerate(manifest.inputs):
        before = _document_station(manifest.input_path(index))
        if before is None or before.fingerprint != recorded.fingerprint or missing_outputs(before):
            break
        paths += [part.path for part in _parts(before, "kept")]
    return paths


def _texts_by_name(path: Path, names: Collection[tuple[str, str]]) -> dict[tuple[str, str], set[str]]:
    """Texts of the documents with these sources and ids, two at most of each; row groups without any give only their
    ids."""
    found: dict[tuple[str, str], set[str]] = {}
    ids = pa.array([id for _, id in names], ARROW_TYPE)
    with reading_station_file(path), pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            there = pc.is_in(file.read_row_group(group, columns=["id"], use_threads=False)["id"].cast(ARROW_TYPE), ids)
            if not pc.any(there).as_py():
                continue
            table = file.read_row_group(group, columns=["source", "id", "text"], use_threads=False).filter(there)
            for row in table.to_pylist():
                name = row["source"], row["id"]
                if name in names and len(found.setdefault(name, set())) < 2:
                    found[name].add(row["text"])
    return found


def _refuse_unknown(folder: Path, wanted: Wanted, scans: Sequence[_Scan]) -> None:
    """A source or a reason that no document has is a slip of the pen."""
    sources = set().union(*(scan.sources for scan in scans))
    if wanted.source is not None and wanted.source not in sources:
        raise DataError(
            f"{folder}: no document of source {wanted.source!r}{did_you_mean(wanted.source, sources)}; "
            f"there are {', '.join(sorted(sources))}"
        )
    reasons = {tally.reason: None for scan in scans for tally in scan.tallies.values()}
    if wanted.reason is not None and not any(map(wanted.shows, reasons)):
        raise DataError(
            f"{folder}: no reason has {wanted.reason!r} in it{did_you_mean(wanted.reason, reasons)}; "
            f"there are {', '.join(reasons)}"
        )
