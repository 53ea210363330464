"""The verbs that look at data: what training will read, what stations did, what a set holds, whether it is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from megalite.cli.data.options import Include, Set, TextField, Workers, make_settings, open_corpus, report_console
from megalite.cli.paths import named_file, not_an_input

if TYPE_CHECKING:
    from rich.text import Text

    from megalite.config.schema import Config
    from megalite.corpus.effects import Effect, Effects
    from megalite.corpus.inspection import DocumentGroup, Example, Inspection
    from megalite.data.cursor import DataCursor
    from megalite.data.samples import Samples
    from megalite.data.verify import CheckPlan


def show(
    config: Annotated[Path, typer.Argument(help="A training config.")],
    steps: Annotated[str, typer.Option(help="A:B for steps A to B - 1, counted from 1.")] = "1:4",
    numbers: Annotated[
        str | None, typer.Option("--samples", help="A:B for these samples as text, as events.jsonl has them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(callback=named_file, help="Write arrays to this .npz file instead of text.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
) -> None:
    """Show the batches that training will see: some as text, or all of them as arrays in a file."""
    from megalite.checkpoint.sizes_so_far import batch_sizes_of
    from megalite.config.length_stages import stage_of_steps
    from megalite.data import show as showing
    from megalite.data.run_config import load_run

    not_an_input(out, config)
    wanted = showing.parse_steps(steps)
    settings = load_run(config, overrides or [])
    sizes = batch_sizes_of(settings)
    chosen = showing.parse_samples(numbers) if numbers is not None else None
    run = find_run(settings)
    if chosen is not None:  # the steps that read them, or before which they were left out
        first, last = (run.cursor.run_index(number) for number in (chosen.start, chosen.stop - 1))
        wanted = range(sizes.steps_for(first + 1), sizes.steps_for(last + 1) + 1)
    stage = stage_of_steps(settings, wanted.start, wanted.stop - 1)
    if run.samples is not None and stage.number == run.stage:
        opened, cursor = run.samples, run.cursor
    else:
        opened = showing.open_training_data(stage.config)
        cursor = run.cursor.of_other_data()
    samples = opened.beginning_at(sizes.first_sample(stage.first_step)).following(cursor)
    if chosen is not None:
        for line in showing.describe_samples(samples, chosen, colour=_has_colour()):
            typer.echo(line)
        return
    if out is None:
        for line in showing.describe(samples, wanted, sizes, colour=_has_colour()):
            typer.echo(line)
        return
    arrays = showing.collect_arrays(samples, wanted, sizes)
    showing.save_arrays(out, arrays)
    shape = list(arrays["tokens"].shape)
    typer.echo(f"{out}: steps {wanted.start} to {wanted.stop - 1}: {', '.join(arrays)} of shape {shape}")


def _has_colour() -> bool:
    """Whether what is printed goes to a terminal that shows colours, and nobody has asked for none."""
    from rich.console import Console

    return Console().color_system is not None


class StandingRun(NamedTuple):
    """The run in a folder, as its newest checkpoint has it."""

    stage: int | None
    """Number of the stage of one length that it stands in; None for a run that is new."""
    samples: Samples | None
    """Of that stage."""
    cursor: DataCursor
    """What it has left out."""


def find_run(config: Config) -> StandingRun:
    """The run in a config's folder; a new one, as is said, where that was over other data.

    Raises:
        CheckpointError: its newest checkpoint is damaged.
        DataError: the data of the stage that it stands in cannot be opened.
    """
    from megalite.checkpoint import catalog
    from megalite.checkpoint.format import read_manifest
    from megalite.config.length_stages import stage_of_steps
    from megalite.data import show as showing
    from megalite.data.cursor import DataCursor

    newest = catalog.latest(config.run.dir)
    if newest is None:
        return StandingRun(None, None, DataCursor())
    manifest = read_manifest(newest)
    stage = stage_of_steps(config, manifest.progress.step, manifest.progress.step)
    samples = showing.open_training_data(stage.config)
    if manifest.data.get("fingerprint") == samples.fingerprint:
        return StandingRun(stage.number, samples, manifest.progress.account)
    typer.echo(
        f"{config.run.dir} holds a run over other data, or in another order; shown is a new run of this config",
        err=True,
    )
    return StandingRun(None, None, DataCursor())


def inspect(
    folder: Annotated[Path, typer.Argument(help="Of a station of documents, or the `out` folder of a recipe.")],
    reason: Annotated[str | None, typer.Option(help="Show only reasons with this in them; `kept` for kept.")] = None,
    num: Annotated[int, typer.Option(min=0, help="Examples of each reason.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Another seed shows other examples.")] = 0,
    chars: Annotated[int, typer.Option(min=1, help="Text shown of each example.")] = 300,
    source: Annotated[str | None, typer.Option(help="Look at documents of this source only.")] = None,
) -> None:
    """Show what stations kept and what they put aside: counts by reason, and random examples of each."""
    from megalite.corpus import inspection

    wanted = inspection.Wanted(num=num, seed=seed, reason=reason, source=source)
    for station in inspection.inspect(folder, wanted):
        _print_counts(station)
        for group in station.groups:
            _print_examples(group, chars)


def effects(
    inputs: Annotated[list[Path] | None, typer.Argument(help="Files or folders; none for the recipe's.")] = None,
    settings: Set = None,
    recipe: Annotated[Path | None, typer.Option(help="A recipe; its `clean` section has the rules.")] = None,
    mb: Annotated[float, typer.Option(min=0.001, help="Read about this many MB of text.")] = 20.0,
    out: Annotated[
        Path | None, typer.Option(callback=named_file, help="Write a page with drawings to this .html file too.")
    ] = None,
    text_field: TextField = "text",
    include: Include = None,
) -> None:
    """Show what each quality rule would reject of a sample, and how its statistic lies around the threshold."""
    from megalite.corpus import effects as measuring
    from megalite.corpus.corpus import Corpus
    from megalite.corpus.prepare import load_recipe
    from megalite.corpus.recipe import CleanConfig
    from megalite.errors import UserError

    not_an_input(out, *inputs or (), *([recipe] if recipe else []))
    given = load_recipe(recipe, [f"clean.{each}" for each in settings or ()]) if recipe else None
    if not inputs and given is None:
        raise UserError("nothing to read: name files or folders, or a recipe with --recipe")
    config = given.clean if given else make_settings(CleanConfig, settings)
    corpus = open_corpus(inputs, text_field, include) if inputs else Corpus(given.sources if given else ())
    found = measuring.measure_effects(corpus, measuring.with_rule_sets(config), max_mb=mb)
    _print_effects(found)
    if out is not None:
        measuring.write_page(out, found)
        typer.echo(f"{out}: written")


def _print_counts(station: Inspection) -> None:
    from rich.markup import escape

    from megalite.page.terminal import FittingTable

    megabytes_in = "" if station.text_bytes_in is None else f" of {station.text_bytes_in / 1e6:,.1f} MB"
    typer.echo(f"{station.folder}: {station.station} read {station.documents_in:,} documents{megabytes_in}")
    table = FittingTable("", "reason")
    for head in ("documents", "share", "text MB"):
        table.add_column(head, justify="right")
    for group in station.groups:
        share = f"{group.documents / max(station.documents_in, 1):.2%}"
        megabytes = "" if group.text_bytes is None else f"{group.text_bytes / 1e6:,.1f}"
        reason = "" if group.fate == "kept" else escape(group.reason)
        table.add_row(group.fate, reason, f"{group.documents:,}", share, megabytes)
    report_console().print(table)


def _print_examples(group: DocumentGroup, chars: int) -> None:
    for example in group.examples:
        fate = group.fate if group.fate == "kept" else f"{group.fate}: {group.reason}"
        detail = f" ({example.detail})" if example.detail else ""
        typer.echo(f"\n{_printable(fate + detail)}")
        typer.echo(f"  {_printable(f'{example.id}, source {example.source}')}, {_length(example)}")
        for line in _printable((example.text or "")[:chars]).splitlines():
            typer.echo(f"    {line}")
    if group.examples:
        typer.echo("")


def _length(example: Example) -> str:
    if example.has_namesakes:
        return "its text cannot be told: several documents have this id"
    if example.text is None:
        return "its text is not in the folder of the station before any more"
    return f"{len(example.text):,} characters"


def _printable(text: str) -> str:
    """Raw documents may hold control characters, which are orders to a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _print_effects(found: Effects) -> None:
    from megalite.corpus.effects import EXPLANATION, QUANTILES, compact, headline
    from megalite.page.terminal import FittingTable

    typer.echo(headline(found))
    table = FittingTable("rule", "keeps", caption=EXPLANATION, caption_justify="left")
    for head in ("rejected", "alone", *(f"{share:.0%}" for share in QUANTILES)):
        table.add_column(head, justify="right")
    for effect in found.rules:
        shares = (f"{count / found.documents:.1%}" for count in (effect.rejected, effect.rejected_alone))
        keeps = f"{effect.keep} {compact(effect.threshold)}"
        table.add_row(_rule_cell(effect), keeps, *shares, *map(compact, effect.quantiles))
    report_console().print(table)


def _rule_cell(effect: Effect) -> Text:
    """The rule's name over its histogram: a bar where the threshold lies, red what is rejected."""
    from rich.text import Text

    below, above = effect.histogram.bars
    styles = ("red", "green") if effect.histogram.rejects_below else ("green", "red")
    return Text.assemble(f"{effect.reason}\n", (below, styles[0]), "|", (above, styles[1]))


def card(
    out: Annotated[Path, typer.Argument(help="Folder of a recipe that `prepare` has finished.")],
    recipe: Annotated[Path | None, typer.Option(help="The recipe, for what it says of its sources.")] = None,
    open_nothing: Annotated[bool, typer.Option("--open-nothing", help="Do not show the page in a browser.")] = False,
) -> None:
    """Describe a prepared set: card.json and card.html in its folder, and a summary here."""
    from megalite.corpus.card.make import HTML_FILE, make_card, write_card
    from megalite.corpus.card.terminal import summary
    from megalite.corpus.prepare import load_recipe

    made = make_card(out, load_recipe(recipe) if recipe is not None else None)
    write_card(out, made)
    report_console().print(summary(made))
    page = out.absolute() / HTML_FILE
    typer.echo(str(page))
    if not open_nothing and sys.stdout.isatty():
        _show_in_browser(page)


def _show_in_browser(page: Path) -> None:
    """Open a page where there is a desktop. A browser of text, as servers have, would take the terminal away."""
    import webbrowser

    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:  # text browsers are of this class, desktop ones of others
        browser.open(page.as_uri())


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

    listings = [_plan_checks(path) for path in paths]
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


def _plan_checks(path: Path) -> CheckPlan:
    from megalite.data.run_config import load_run
    from megalite.data.verify import list_path, list_run

    if path.suffix in CONFIG_SUFFIXES and not path.is_dir():
        return list_run(load_run(path))
    return list_path(path)
