"""Which stations a prepared set went through: followed from the tokens back to the raw files, by the manifests.

    packed/train -> tokens/train -> ... -> near-dedup -> dedup -> clean -> raw
                         \\-> tokenizer

A folder that an earlier recipe left in the same place is on no such path, so it does not get onto the card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megalite.corpus.split import Part
from megalite.errors import DataError
from megalite.stations.facts import DOCUMENT_STATIONS
from megalite.stations.manifest import StationManifest, check_input, find_manifest


@dataclass(frozen=True)
class Lineage:
    """The manifests behind a prepared set."""

    documents: tuple[StationManifest, ...]
    """Of the stations that leave documents, the first one first."""
    tokenizer: StationManifest | None
    """None for a tokenizer that was there before."""
    tokenizer_folder: Path
    tokens: dict[Part, StationManifest]
    """By part: `train`, and `valid` where documents were held out."""
    packed: dict[Part, StationManifest]
    chat_tokenizer: StationManifest | None = None
    """Where the recipe gave the tokenizer a chat template."""

    @property
    def stations(self) -> list[StationManifest]:
        """All of them, in their order."""
        parts = [manifest for part in self.tokens for manifest in (self.tokens[part], self.packed[part])]
        return [*self.documents, *filter(None, (self.tokenizer, self.chat_tokenizer)), *parts]


def trace(out: Path) -> Lineage:
    """Find the stations of a recipe's folder.

    Args:
        out: the recipe's `out`.

    Raises:
        DataError: it is not a recipe's folder, the recipe is not finished, or a station has changed since.
    """
    _refuse_unfinished(out)
    train = check_input(out / "tokens/train", "tokenize", contents=False)
    split = train.settings.get("split")
    parts: tuple[Part, ...] = ("train",) if split is None or split["part"] == "all" else ("train", "valid")
    tokens = {part: check_input(out / "tokens" / part, "tokenize", contents=False) for part in parts}
    packed = {part: check_input(out / "packed" / part, "pack", contents=False) for part in parts}
    for part in parts:
        _refuse_changed(packed[part], tokens[part])
    chain = [_before(train)]
    while chain[0].station != "clean":
        chain.insert(0, _before(chain[0]))
    folder = train.input_path(train.settings["tokenizer_input"])
    made, chat = find_manifest(folder), None
    if made is not None and made.station == "chat-tokenizer":
        made, chat = find_manifest(made.input_path()), made
    return Lineage(tuple(chain), made, folder, tokens, packed, chat)


def _before(manifest: StationManifest) -> StationManifest:
    """The station whose documents another one read."""
    folder = manifest.input_path()
    found = find_manifest(folder)
    if found is None or found.station not in DOCUMENT_STATIONS:
        what = "is not there" if found is None else f"was made by station {found.station!r}"
        raise DataError(
            f"{folder}: {manifest.folder} was made of it, but it {what}; a folder of documents that a station left is "
            "expected: put it back, or run `megalite data prepare RECIPE` again"
        )
    _refuse_changed(manifest, found)
    return check_input(folder, found.station, contents=False)


def _refuse_changed(manifest: StationManifest, read: StationManifest) -> None:
    if manifest.inputs[0].fingerprint != read.fingerprint:
        raise DataError(
            f"{read.folder}: has changed since {manifest.folder} was made of it; run `megalite data prepare RECIPE` "
            "again, which redoes only what follows the change"
        )


def _refuse_unfinished(out: Path) -> None:
    if not out.is_dir():
        raise DataError(f"{out}: no such folder; the `out` of a recipe is needed here")
    missing = [name for name in ("tokens/train", "packed/train") if find_manifest(out / name) is None]
    if missing:
        found = sorted(path.parent.relative_to(out).as_posix() for path in out.glob("*/manifest.json"))
        raise DataError(
            f"{out}: found {', '.join(found) or 'no station'}, but not {' and '.join(missing)}: no prepared set, or "
            "one that is not finished; run `megalite data prepare RECIPE`, which goes on where it was"
        )
