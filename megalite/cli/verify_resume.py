"""`megalite verify-resume`."""

from __future__ import annotations

from pathlib import Path

import typer


def verify_resume(
    config: Path = typer.Argument(..., help="The run's YAML file."),
    overrides: list[str] = typer.Argument(None, help="Settings that replace the file's: section.key=value ..."),
    steps: int = typer.Option(3, "--steps", min=1, help="Steps before and after the restart."),
) -> int:
    """Prove that a restart changes nothing: train 2 N steps, and N + restart + N, and compare bit for bit.

    Runs in temporary folders; the run's own folder is not touched. Exit code 0 when all is equal, 1 when not.
    """
    import tempfile

    from rich.console import Console

    from megalite.errors import EXIT_DONE, EXIT_FAULT, UserError
    from megalite.page.terminal import FittingTable
    from megalite.train.place import given_place
    from megalite.train.verify_resume import verify_resume

    if given_place() is not None:
        raise UserError("verify-resume starts its own ranks; run it by itself, not under srun or torchrun")
    with tempfile.TemporaryDirectory(prefix="megalite-resume-") as folder:
        report = verify_resume(config, overrides or (), steps, Path(folder))
    table = FittingTable("compared", f"steps 1-{steps}", f"after the restart, {steps + 1}-{2 * steps}", box=None)
    for finding in report.findings:
        cells = (finding.until_restart, finding.after_restart)
        table.add_row(finding.what, *(f"[red]differs[/]: {cell}" if cell else "[green]equal[/]" for cell in cells))
    Console().print(table)
    typer.echo(report.verdict)
    return EXIT_DONE if report.is_equal else EXIT_FAULT
