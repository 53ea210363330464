"""`megalite config`: look at a config before it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalite.config.optimizers import FROZEN
from megalite.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megalite.architecture.architecture import Architecture
    from megalite.checkpoint.hf.families.registry import Exportable
    from megalite.config.plan import RunPlan
    from megalite.config.schema import Config
    from megalite.planner.memory import StageMemory
    from megalite.planner.traffic import StageTraffic

app = typer.Typer(help="Check configs, list presets, show what a config resolves to.", no_args_is_help=True)

ConfigFile = Annotated[Path, typer.Argument(help="A run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that replace the file's: section.key=value ...", show_default=False),
]

ASSUMED_VOCAB_SIZE = 32000
"""Stands in for a tokenizer's vocabulary where a config leaves it open; a note says so."""


def known_vocabulary(config: Config, given: int | None) -> tuple[int, list[str]]:
    """The vocabulary to count with, and what there is to say of it.

    Args:
        given: by `--vocab-size`.

    Raises:
        UserError: the config has another one.
    """
    own = config.model.vocab_size
    if own is not None and given not in (None, own):
        raise UserError(f"--vocab-size: found {given}, but model.vocab_size={own}; leave out one of them")
    if own is None and given is None:
        said = f"model.vocab_size is left to the tokenizer; {ASSUMED_VOCAB_SIZE} assumed here, or give --vocab-size"
        return ASSUMED_VOCAB_SIZE, [said]
    return own or given or ASSUMED_VOCAB_SIZE, []


@app.command()
def check(
    config: ConfigFile,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks; pp x dp x cp x tp when not given.", show_default=False)
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary, where the config takes the tokenizer's.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Validate a config for a number of ranks; print its shapes, parameters, memory and pipeline, and DeepSpeed's JSON.

    Needs neither the ranks nor their memory: a laptop checks 70B on 512 GPUs.
    """
    from megalite.checkpoint.hf.families.registry import exportable
    from megalite.config.engine import choose_engine
    from megalite.config.length_stages import length_stages, plan_stage
    from megalite.config.pipeline import prove_pipeline
    from megalite.config.plan import default_world_size
    from megalite.config.validate import validate
    from megalite.data.run_config import load_run
    from megalite.engine.deepspeed.config import deepspeed_config
    from megalite.planner.holdings import state_bytes_per_parameter
    from megalite.planner.memory import memory_by_stage
    from megalite.planner.traffic import traffic_by_stage

    loaded = load_run(config, overrides or ())
    num_ranks = world_size or default_world_size(loaded)
    validate(loaded, num_ranks)
    vocab_size, notes = known_vocabulary(loaded, vocab_size)
    lengths = [(stage.config, plan_stage(loaded, stage, num_ranks, vocab_size)) for stage in length_stages(loaded)]
    for own, planned in lengths:
        prove_pipeline(own, planned)
    plan = lengths[0][1]
    memory, traffic = memory_by_stage(lengths[0][0], plan), traffic_by_stage(lengths[0][0], plan)
    engine = choose_engine(loaded)
    json_config = deepspeed_config(loaded, plan) if engine == "deepspeed" else None
    export = exportable(plan.model)
    notes += [*_export_notes(export), *_engine_notes(loaded, plan, engine)]
    if world_size is None:
        notes += dict.fromkeys(note for own, planned in lengths for note in _fit_notes(own, planned))
    by_length = [_facts_of_length(own, planned) for own, planned in lengths] if len(lengths) > 1 else []
    if as_json:
        stages = [stage.to_dict() | _process(lengths[0][0], stage) for stage in memory]
        report = {"plan": plan.to_dict(), "memory": stages, "engine": engine, "deepspeed": json_config, "notes": notes}
        report |= {"export": asdict(export), "sent": [stage.to_dict() for stage in traffic], "lengths": by_length}
        typer.echo(json.dumps({**report, "optimizer_bytes_per_parameter": state_bytes_per_parameter(loaded, plan)}))
        return
    title = f"{config} on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    state = f"{loaded.optimizer.name}, {state_bytes_per_parameter(loaded, plan):.2f} bytes of state a parameter"
    export_as = export.architecture or "no class of transformers"
    rows = {"engine": _engine(loaded, engine), "optimizer": state, "pipeline": _pipeline(loaded, plan)}
    rows |= {"sent a step": _sent(traffic), "exports as": export_as}
    table = _plan_table(plan, rows)
    tables = (table, _memory_table(lengths[0][0], plan, memory), *map(_lengths_table, filter(None, [by_length])))
    _print_report(title, tables, json_config, notes)


@app.command()
def presets() -> None:
    """List the presets of `model.preset`."""
    from megalite.config.presets import PRESETS

    table = _table("preset", "hidden", "layers", "heads", "vocabulary", "what it is")
    for name, preset in PRESETS.items():
        model = preset.model
        heads = f"{model['num_heads']} / {model.get('num_kv_heads', model['num_heads'])}"
        sizes = str(model["hidden_size"]), str(model["num_layers"]), heads
        table.add_row(name, *sizes, str(model.get("vocab_size", "tokenizer's")), preset.about)
    _console().print(table)


@app.command()
def show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print a config with its preset and all defaults filled in, as YAML."""
    from megalite.config.load import dump_config, load_config

    typer.echo(dump_config(load_config(config, overrides or ())), nl=False)


@app.command()
def weights(
    config: ConfigFile,
    overrides: Overrides = None,
    match: Annotated[
        str, typer.Option(help="Only those whose name is like this pattern, as in optimizer.groups.")
    ] = "*",
) -> None:
    """List the weights of a config's model by the names that `optimizer.groups` matches, and how each is updated."""
    from fnmatch import fnmatchcase

    from megalite.architecture.weights import weight_table
    from megalite.config.fill import fill
    from megalite.config.load import load_config
    from megalite.config.weight_groups import group_number
    from megalite.optim.groups import rates_of
    from megalite.optim.rules import rule_of

    loaded = load_config(config, overrides or ())
    model, optimizer = fill(loaded, ASSUMED_VOCAB_SIZE), loaded.optimizer
    found = [weight for weight in weight_table(model).values() if fnmatchcase(weight.name, match)]
    if not found:
        raise UserError(f"--match: no weight of {config} has a name like {match!r}; leave it out to see all names")
    table = _table("weight", "shape", "group", "rule", "rate", "decay")
    for weight in found:
        rates, group = rates_of(weight, optimizer, model), group_number(weight.name, optimizer)
        shape = " x ".join(f"{size:,}" for size in weight.shape)
        rate, decay = f"{rates.lr_scale * optimizer.lr:.3g}", f"{rates.weight_decay:.3g}"
        rule = rule_of(weight, optimizer)
        if rule == FROZEN:
            rate = decay = "-"
        table.add_row(weight.name, shape, "" if group is None else str(group), rule, rate, decay)
    _console().print(table)


def _export_notes(export: Exportable) -> Iterator[str]:
    if export.why_not:
        yield f"it trains, but cannot be exported to Hugging Face: {export.why_not}"
    if export.condition:
        yield f"to be exported as {export.architecture}, {export.condition}"


def _engine_notes(config: Config, plan: RunPlan, engine: str) -> Iterator[str]:
    from megalite.config.engine import unknown_to_fsdp2

    is_uncompiled = engine == "deepspeed" and plan.sharding.weights and config.train.compile != "off"
    if is_uncompiled and not any(unknown_to_fsdp2(config)):
        yield (
            "DeepSpeed divides the weights, and its blocks cannot be compiled; parallel.engine=fsdp2 divides them "
            "alike and compiles"
        )


def _facts_of_length(config: Config, plan: RunPlan) -> dict[str, Any]:
    """What a stage of one length comes to."""
    from megalite.planner.memory import memory_by_stage

    return {
        "first_step": plan.first_step,
        "last_step": plan.last_step,
        "seq_len": config.batch.seq_len,
        "theta": config.model.rope.theta,
        "tokens_per_step": plan.tokens_per_step,
        "bytes": max(stage.total for stage in memory_by_stage(config, plan)),
    }


def _lengths_table(by_length: Sequence[dict[str, Any]]) -> Table:
    """The stages of `batch.stages`, from the run's beginning on."""
    table = _table("steps", "sequence", "tokens a step", "theta", "GiB of the fullest rank", title="lengths")
    for facts in by_length:
        steps, size = f"{facts['first_step']:,}-{facts['last_step']:,}", f"{facts['bytes'] / 2**30:.1f}"
        table.add_row(steps, f"{facts['seq_len']:,}", f"{facts['tokens_per_step']:,}", f"{facts['theta']:g}", size)
    return table


def _fit_notes(config: Config, plan: RunPlan) -> list[str]:
    """Why `megalite train` would refuse to start the run here; nothing when it would not."""
    from megalite.train.fit import check_fit

    try:
        check_fit(config, plan, range(plan.world_size))
    except UserError as error:
        return [f"not on this machine: {error}"]
    return []


def _pipeline(config: Config, plan: RunPlan) -> str:
    """The schedule of a step, and how long stages wait in it."""
    if plan.pp == 1:
        return "none"
    from megalite.planner.pipeline import report_pipeline

    bubble = report_pipeline(config, plan, plan.grad_accum_steps).timeline.bubble
    chunks = " and ".join(dict.fromkeys(str(len(plan.chunks_of(stage))) for stage in range(plan.pp)))
    held = f"{chunks} chunk{'' if chunks == '1' else 's'} of layers on each stage"
    return f"{config.parallel.schedule}, {held}; stages wait {100 * bubble:.1f} % of a step"


def _print_report(title: str, tables: tuple[Table, ...], json_config: dict[str, Any] | None, notes: list[str]) -> None:
    console = _console()
    console.print(f"[bold]{title}: valid[/bold]")
    for note in notes:
        console.print(f"[yellow]note:[/yellow] {note}", highlight=False)
    for table in tables:
        console.print()
        console.print(table)
    if json_config is not None:
        console.print("\n[bold]DeepSpeed's JSON[/bold]")
        console.print_json(data=json_config)


def _sent(traffic: tuple[StageTraffic, ...]) -> str:
    """What the rank that sends most sends in a step."""
    largest = {axis: max(getattr(stage, axis) for stage in traffic) for axis in ("tp", "cp", "pp", "ep", "dp")}
    shown = {axis: size for axis, size in largest.items() if size or axis in ("tp", "pp")}
    by_axis = ", ".join(f"{size / 1e6:,.1f} MB over {axis}" for axis, size in shown.items())
    return f"{by_axis}, by the rank that sends most"


def _engine(config: Config, engine: str) -> str:
    """The engine, and who has chosen it."""
    chosen = "" if config.parallel.engine == engine else ", as parallel.engine=null chooses"
    return f"{engine}{chosen}"


def _plan_table(plan: RunPlan, more: dict[str, str]) -> Table:
    """What a plan comes to, and further rows by their names."""
    from megalite.config.wording import counted

    model = plan.model
    ranks = f"pp {plan.pp} x dp {plan.dp} x cp {plan.cp} x tp {plan.tp}"
    ranks += f", experts over {plan.ep} of dp x cp" if plan.ep > 1 else ""
    heads = f"{model.num_heads} query, {model.num_kv_heads} key and value, {model.head_dim} wide"
    rows = {
        "ranks": f"{plan.world_size} = {ranks}",
        "parameters": f"{plan.num_parameters:,}",
        "model": f"hidden {model.hidden_size}, {model.num_layers} layers, MLP {model.ffn_hidden_size}",
        **_experts_row(model),
        "heads": heads,
        "vocabulary": f"{model.vocab_size:,}, padded to {plan.padded_vocab_size:,}",
        "step": f"{plan.tokens_per_step:,} tokens, {counted(plan.grad_accum_steps)} a rank",
        "run": f"{plan.total_steps:,} steps, {plan.total_tokens:,} tokens",
        "work": f"{plan.flops_per_token:.4g} FLOP a token, {plan.flops_per_token * plan.total_tokens:.4g} FLOP in all",
        **more,
    }
    table = _table("plan", "")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _experts_row(model: Architecture) -> dict[str, str]:
    """What the plan says of experts."""
    from megalite.architecture.costs import count_active_parameters

    moe = model.moe
    if moe is None:
        return {}
    shared = f", and one of {moe.shared_ffn_hidden_size} for all" if moe.shared_ffn_hidden_size else ""
    each = f"{moe.num_experts} of width {moe.ffn_hidden_size}{shared}, in {sum(model.sparse_blocks)} blocks"
    return {"experts": f"{each}; {moe.top_k} a token, which meets {count_active_parameters(model):,} parameters"}


def _memory_table(config: Config, plan: RunPlan, memory: tuple[StageMemory, ...]) -> Table:
    large = max(stage.total for stage in memory) >= 10 * 2**30
    unit, size, decimals = ("GiB", 2**30, 1) if large else ("MiB", 2**20, 0)
    parts = {"weights": "weights", "gradients": "grads", "optimizer": "optim", "activations": "activ"}
    parts |= {"head": "head", "buffers": "comm", "total": "total"}
    parts |= {"host": "on the host"} if any(stage.host for stage in memory) else {}
    of_process = _process(config, memory[0])
    title = f"{unit} of tensors on each rank, at the peak of a step"
    table = _table("stage", "blocks", "parameters", *parts.values(), *of_process, title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    for stage in memory:
        sizes = stage.to_dict()
        taken = [*(sizes[part] for part in parts), *_process(config, stage).values()]
        shares = [f"{each / size:,.{decimals}f}" for each in taken]
        table.add_row(str(stage.stage), _ranges(plan, stage.stage), f"{stage.num_parameters:,}", *shares)
    return table


def _process(config: Config, stage: StageMemory) -> dict[str, int]:
    """What the whole process of a rank takes, where it is on a CPU."""
    from megalite.planner.process import process_bytes

    return {"process": process_bytes(config, stage.total)} if config.train.device == "cpu" else {}


def _ranges(plan: RunPlan, stage: int) -> str:
    """The blocks of each chunk of a stage."""
    bounds = [plan.chunk_blocks[chunk] for chunk in plan.chunks_of(stage)]
    return " ".join(f"{first}-{stop - 1}" if stop > first else "none" for first, stop in bounds)


def _console() -> Console:
    from megalite.cli.data.options import report_console

    return report_console()


def _table(*columns: str, title: str | None = None) -> Table:
    from megalite.page.terminal import figures

    return figures(*columns, title=title)
