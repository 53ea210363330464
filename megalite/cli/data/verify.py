"""The verb that compares data with its checksums."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.data.options import Workers

if TYPE_CHECKING:
    from megalite.data.verify import CheckPlan

CONFIG_SUFFIXES = (".yaml", ".yml")


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Folders of stations or of recipes, prefixes of Megatron pairs, or training configs."),
    ],
    workers: Workers = None,
) -> None:
    """Read all of some data and compare it with its checksums; exit code 2 names what is damaged."""
    from megalite.data.verify import complaints, refuse
    from megalite.progress import progress_on
    from megalite.stations.runners import default_workers

    listings = [_list(path) for path in paths]
    for listing in listings:
        with progress_on() as progress:
            progress.start("verify", listing.num_bytes / 1e6, "MB")
            found = list(complaints(listing.checks, threads=workers or default_workers(), progress=progress))
            progress.finish(f"{listing.num_bytes / 1e6:,.1f} MB read")
        for note in listing.notes:
            typer.echo(f"note: {note}")
        refuse(found, listing)
        for name in listing.names:
            typer.echo(f"{name}: whole")


def _list(path: Path) -> CheckPlan:
    from megalite.config.load import load_config
    from megalite.data.verify import list_path, list_run

    if path.suffix in CONFIG_SUFFIXES and not path.is_dir():
        return list_run(load_config(path))
    return list_path(path)
