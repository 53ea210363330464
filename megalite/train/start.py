"""Where a run's weights come from: its own newest checkpoint, another model, or a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Rectangle, Weight
from megalite.checkpoint import catalog
from megalite.checkpoint.averaged_weights import model_weights
from megalite.checkpoint.data_so_far import go_on_with_data
from megalite.checkpoint.format import MANIFEST, Progress, stored_model
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.fill import scales_in_words
from megalite.config.model_match import match
from megalite.config.schema import Config
from megalite.errors import CheckpointError, ConversionError, UserError
from megalite.model.initialize import FreshWeights, WeightSource, WithFreshPredictions
from megalite.model.lora import WithAdaptersAdded, WithFreshAdapters, without_lora
from megalite.model.scales import WithFreshScales, without_scales
from megalite.optim.rules import state_kinds
from megalite.parallel.axes import Axes
from megalite.parallel.collectives import any_rank, from_all
from megalite.train.optimizer_change import changed_optimizer
from megalite.train.preflight import ReadyStage
from megalite.train.run_folder import CONFIG

NOT_COMPARED = "not compared with transformers, as asked"


class Zeros:
    """State of an optimizer that has not stepped yet, or weights that are about to be loaded."""

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        return torch.zeros(rectangle.shape)


@dataclass(frozen=True)
class Start:
    """The state a run starts from."""

    weights: WeightSource
    moments: dict[str, WeightSource]
    progress: Progress = field(default_factory=Progress)
    origin: str = ""
    """For people: where the weights come from."""
    remixed: bool = False
    """The sources' shares are others from here on."""
    damaged: tuple[str, ...] = ()
    """What is wrong with newer checkpoints that had to be passed over."""
    reader: CheckpointReader | None = None
    """The checkpoint that the run goes on from, with what it has besides weights and moments; None for a new run."""
    set_aside: tuple[Path, ...] = ()
    """Where damaged checkpoints are now; on the first rank."""
    choices: tuple[str, ...] = ()
    """Where the run's model computes something else from these weights than the one they are of, on purpose."""
    trained_as: Architecture | None = None
    """The model that the weights are of, where it is known and may differ from the run's."""
    proof: str = ""
    """What was compared of a Hugging Face folder before its weights were taken."""


def choose_start(config: Config, stages: Sequence[ReadyStage], axes: Axes, device: torch.device) -> Start:
    """Find the state to start from. Collective: ranks share the checking of files.

    Args:
        stages: of the run.

    Raises:
        CheckpointError: every checkpoint of the run is damaged, or the data is not what the run was trained on.
    """
    damaged: list[str] = []
    passed_over: list[Path] = []
    for folder in newest_first(config.run.dir / catalog.CHECKPOINTS, axes):
        problems = verify(folder, axes, device)
        if problems is None:
            misnamed = filter(None, map(catalog.name_problem, catalog.complete(folder.parent)))
            damaged += [problem for problem in misnamed if problem not in damaged]
            start = open_checkpoint(folder, stages, f"checkpoint {folder}", tuple(damaged))
            return replace(start, set_aside=set_aside(passed_over, axes))
        passed_over.append(folder)
        damaged += problems
    if damaged:
        raise CheckpointError(
            "no checkpoint of this run is whole:\n  "
            + "\n  ".join(damaged)
            + f"\nremove {config.run.dir / catalog.CHECKPOINTS} to start anew, or set run.dir to a new folder"
        )
    return first_start(config, stages, axes, device)


def first_start(
    config: Config, stages: Sequence[ReadyStage], axes: Axes, device: torch.device, *, again: bool = False
) -> Start:
    """What a run without checkpoints begins with. Collective.

    Args:
        again: it did so before, so nothing is compared.

    Raises:
        CheckpointError: it is damaged, or the data is not what a branch's trunk was trained on.
    """
    model = stages[0].plan.model
    zeros: dict[str, WeightSource] = {key: Zeros() for key in state_kinds()}
    branch_from, init_from = config.train.branch_from, config.train.init_from
    if branch_from is not None:
        trunk = _open_whole(branch_from, "train.branch_from", axes, device)
        if trunk is None:
            raise CheckpointError(f"train.branch_from: {branch_from} is no complete checkpoint; give a step-… folder")
        start = open_checkpoint(trunk, stages, f"checkpoint {trunk}, as a branch")
        if changed_optimizer(trunk / CONFIG, config):
            anew = replace(start.progress, num_updates=0)
            origin = f"{start.origin}, with optimizer {config.optimizer.name} from its beginning"
            weights = model_weights(CheckpointReader(trunk))
            return replace(start, weights=weights, moments=zeros, progress=anew, origin=origin)
        return start
    if init_from is not None:
        is_compared = config.train.verify_init_from and not again
        keeps_adapters = config.train.preference is None  # else what the run began with is the model without them
        found = _open_weights(
            init_from,
            model,
            axes,
            device,
            seed=config.run.seed,
            is_compared=is_compared,
            keeps_adapters=keeps_adapters,
        )
        return replace(found, moments=zeros, origin=f"weights of {init_from}")
    return Start(FreshWeights(model, config.run.seed), zeros, origin=f"fresh weights, seed {config.run.seed}")


def open_checkpoint(folder: Path, stages: Sequence[ReadyStage], origin: str, damaged: tuple[str, ...] = ()) -> Start:
    """The whole state of a checkpoint.

    Args:
        stages: of the run, one of which it was saved in.

    Raises:
        CheckpointError: it was trained on other data.
    """
    reader = CheckpointReader(folder)
    step = reader.manifest.progress.step
    stage = next((each for each in reversed(stages) if each.plan.first_step <= step), stages[0])
    progress, remixed = go_on_with_data(folder, reader.manifest, stage.samples)
    if step == stage.plan.last_step and stage is not stages[-1]:
        progress = replace(progress, account=progress.account.of_other_data())
    moments: dict[str, WeightSource] = {key: reader.source(key) for key in state_kinds()}
    theirs = stored_model(reader.folder, reader.manifest)
    _require_scales(folder, theirs, stage.plan.model)
    return Start(reader.source("weight"), moments, progress, origin, remixed, damaged, reader, trained_as=theirs)


def _require_scales(folder: Path, theirs: Architecture, ours: Architecture) -> None:
    """Raises CheckpointError: a run would go on with scales that were not trained, or without those that were."""
    had, has = theirs.weight_scales, ours.weight_scales
    if had != has:
        raise CheckpointError(
            f"precision.qat: {scales_in_words(had)} in {folder}, {scales_in_words(has)} now; take it over, or "
            f"start a new run from these weights: run.dir=NEW train.init_from={folder}"
        )


def set_aside(folders: list[Path], axes: Axes) -> tuple[Path, ...]:
    """Take damaged checkpoints out of the way of the run, whose saves would else replace them. The first rank does it.

    Returns:
        Where they are now, on the first rank.
    """
    if axes.global_rank != 0:
        return ()
    return tuple(catalog.set_aside(folder) for folder in reversed(folders))


def newest_first(root: Path, axes: Axes) -> list[Path]:
    """The run's checkpoints as the first rank sees them: on a network other nodes may see them a while later.

    A folder without manifest is among them, to be named: it was whole when it got its name. Collective.
    """
    names, *_ = from_all([path.name for path in reversed(catalog.named(root))], axes.world)
    return [root / name for name in names]


def verify(folder: Path, axes: Axes, device: torch.device) -> list[str] | None:
    """What is wrong with a checkpoint, or None. Each rank checks its share of the files."""
    problems = _damage(folder, axes.global_rank, axes.world.size)
    if not any_rank(bool(problems), axes.world, device):
        return None
    return _damage(folder, 0, 1)  # once more, all of it: every rank tells the whole story


def _damage(folder: Path, first: int, stride: int) -> list[str]:
    try:
        return CheckpointReader(folder).verify(first, stride)
    except CheckpointError as error:
        return [str(error)]


def _open_weights(
    folder: Path,
    model: Architecture,
    axes: Axes,
    device: torch.device,
    *,
    seed: int,
    is_compared: bool,
    keeps_adapters: bool,
) -> Start:
    """The weights of a checkpoint, of a run's newest one, or of a Hugging Face folder. Collective.

    Args:
        seed: of layers that predict further and of adapters, where the weights have none.
        keeps_adapters: weights with the same adapters as the model's go on with them; all others have theirs added.
    """
    checkpoint = _open_whole(folder, "train.init_from", axes, device)
    if checkpoint is not None:
        reader = CheckpointReader(checkpoint)
        theirs = stored_model(reader.folder, reader.manifest)
        source: WeightSource = model_weights(reader)
        if theirs.lora is not None and not (keeps_adapters and theirs.lora == model.lora):
            theirs, source = without_lora(theirs), WithAdaptersAdded(source, theirs)
        if theirs.weight_scales != model.weight_scales and theirs.weight_scales is not None:
            theirs = without_scales(theirs)
        source = _completed(source, theirs, model, seed)
        return Start(source, {}, choices=_compare(checkpoint, theirs, model), trained_as=theirs)
    from megalite.checkpoint.hf.importer import HuggingFaceWeights

    weights = HuggingFaceWeights(folder)
    choices = _compare(folder, weights.model, model)
    proof = _prove(folder, axes) if is_compared else NOT_COMPARED
    source = _completed(weights, weights.model, model, seed)
    return Start(source, {}, choices=choices, trained_as=weights.model, proof=proof)


def _completed(source: WeightSource, theirs: Architecture, ours: Architecture, seed: int) -> WeightSource:
    """Weights with fresh layers that predict further, scales and adapters, where ours has such and theirs has none."""
    fresh = FreshWeights(ours, seed)
    if ours.num_predictions and not theirs.num_predictions:
        if ours.lora is not None:
            raise CheckpointError(
                "model.mtp: the weights have no layers that predict further, and with model.lora fresh ones would stay "
                "as they are drawn; use mtp=null, or lora=null"
            )
        source = WithFreshPredictions(source, fresh)
    if ours.weight_scales is not None and theirs.weight_scales is None:
        source = WithFreshScales(source, ours)
    return WithFreshAdapters(source, fresh) if ours.lora is not None and theirs.lora is None else source


def _compare(folder: Path, theirs: Architecture, ours: Architecture) -> tuple[str, ...]:
    """Where a run's model makes other choices than the one its weights are of.

    Raises:
        CheckpointError: it has another architecture.
    """
    found = match(theirs, ours)
    if found.refused:
        sentences = "\n".join(f"  - {each}" for each in found.refused)
        mup = (
            "\nwhat muP multiplies in the model, others have in the weights: `megalite convert to-hf` exports the "
            "checkpoint with the factors multiplied in, for mup=null"
        )
        raise CheckpointError(
            f"train.init_from: {folder} has weights of another architecture; put theirs into the section model:\n"
            f"{sentences}{mup if theirs.mup != ours.mup else ''}"
        )
    return found.changed


def _prove(folder: Path, axes: Axes) -> str:
    """Let the first rank compare what transformers computes from a folder with what megalite does. Collective.

    Raises:
        ConversionError: on all ranks, when they differ.
    """
    proof, problem = "", None
    if axes.global_rank == 0:
        from megalite.checkpoint.hf.proof import prove

        try:
            proof = prove(folder)
        except UserError as error:
            problem = str(error)
    proof, problem = from_all((proof, problem), axes.world)[0]
    if problem is not None:
        raise ConversionError(
            f"train.init_from: {problem}; --no-verify (train.verify_init_from=false) trains from it all the same"
        )
    return proof


def _open_whole(folder: Path, setting: str, axes: Axes, device: torch.device) -> Path | None:
    """A checkpoint's folder, or that of a run's newest one; None where there is none. Collective.

    Raises:
        CheckpointError: it is damaged.
    """
    checkpoint = folder if (folder / MANIFEST).is_file() else catalog.latest(folder)
    problems = None if checkpoint is None else verify(checkpoint, axes, device)
    if problems is not None:
        raise CheckpointError(f"{setting}: {checkpoint} is damaged:\n  " + "\n  ".join(problems))
    return checkpoint
