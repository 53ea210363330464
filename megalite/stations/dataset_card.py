"""README.md of a station's folder: says to Hugging Face `datasets`, and to its hub, which files are the documents.

Without it `load_dataset(FOLDER)` takes every Parquet file below the folder for the same table, what was rejected or
removed among them, and ends in a CastError. With it, it gives the documents; `load_dataset(FOLDER, "rejected")` gives
what else lies there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from megalite.stations.facts import DOCUMENT_STATIONS

CARD_FILE = "README.md"

DEFAULT = "default"
"""Name of the documents among the tables of a folder."""


def write_dataset_card(folder: Path, station: str) -> None:
    """Write it, if the folder has tables that `datasets` can read."""
    tables = _tables([path.relative_to(folder).as_posix() for path in sorted(folder.rglob("part-*.parquet"))])
    if station in DOCUMENT_STATIONS and tables:
        (folder / CARD_FILE).write_text(_render(station, tables), encoding="utf-8")


def _tables(names: Sequence[str]) -> list[str]:
    """The folders of a station that hold a table, the documents' own first."""
    found = {str(PurePosixPath(name).parent) for name in names}
    return sorted(each for each in found if not each.startswith(".") or each == ".")


def _render(station: str, tables: Sequence[str]) -> str:
    lines = ["---", "configs:"]
    for table in tables:
        name, files = (DEFAULT, "part-*.parquet") if table == "." else (table, f"{table}/part-*.parquet")
        lines += [f"- config_name: {name}", f"  data_files: {files}"]
        lines += ["  default: true"] if name == DEFAULT else []
    others = ", ".join(f'`load_dataset(FOLDER, "{table}")`' for table in tables if table != ".")
    lines += [
        "---",
        "",
        f"Documents as `megalite data {station}` left them; `manifest.json` says from what, and how many.",
    ]
    if others:
        lines += ["", f"`load_dataset(FOLDER)` gives them; {others} what else is here."]
    return "\n".join(lines) + "\n"
