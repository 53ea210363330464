"""megalite from Python: what `from megalite import ...` offers. The command line is made of the same functions.

config = load_config("configs/demo.yaml", ["train.steps=100"])
run_training(config)                                   the whole run, as `megalite train` does it

model = build_model(config)                            or a loop of one's own, in this process
for micro_batches in batches(config, last_step=3):
    loss(model, micro_batches).backward()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megalite.config.batch_sizes import batch_sizes
from megalite.config.length_stages import stage_of_steps
from megalite.config.plan import LOSS_CHUNK_TOKENS, RunPlan, default_world_size, make_plan
from megalite.config.recompute import recompute_of_whole
from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.config.wording import divisors, or_
from megalite.data.loader import Batch, Loader
from megalite.data.run_config import fill_epochs
from megalite.engine.batch_cut import documents_of_batch
from megalite.engine.steps import loss_weights, targets_of_batch
from megalite.errors import UnavailableError, UserError
from megalite.layers.parts import choose_parts
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage
from megalite.plugins import load_plugins
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.evaluation.offline import open_model
from megalite.train.local import train_locally
from megalite.train.preflight import open_data, open_samples_of
from megalite.trial import try_plugins


def plan_run(config: Config, world_size: int | None = None) -> RunPlan:
    """Check a config, and derive what follows from it: the filled model, stages, steps, FLOPs.

    Args:
        world_size: ranks that will run it, 1 or more; None for pp x dp x cp x tp.

    Raises:
        ConfigError: everything that is wrong, one sentence each.
        DataError: there is no data to take the vocabulary from, or it is damaged.
    """
    load_plugins(config.plugins)  # it may come from another process
    config = fill_epochs(config)
    if world_size is None:
        world_size = default_world_size(config)
    elif world_size < 1:
        raise UserError(f"plan_run: found world_size={world_size}, expected 1 or more, or None")
    validate(config, world_size)
    if config.model.vocab_size is not None:
        return make_plan(config, world_size)
    if config.data.tokenizer is not None:
        return make_plan(config, world_size, Tokenizer.load(config.data.tokenizer).vocab_size)
    samples, _ = open_data(config)
    return make_plan(config, world_size, samples.vocab_size)


def build_model(config: Config, weights: Path | str | None = None, device: torch.device | str = "cpu") -> Stage:
    """The whole model of a config, in fp32 on one device, with the loss that the config trains with.

    Args:
        weights: a checkpoint's folder, a run's for its newest, or one in Hugging Face format, whose model it then is;
            None draws the weights that a run of this config starts from.

    Returns:
        A torch module: `model(tokens, documents)` is the stream `[t, h]`, `model.logits(tokens, documents)` the logits
        `[t, v]`, of t tokens that lie end to end. Of sequences `[b, s]`, a document each, these are
        `sequences.flatten()` and `documents_of(sequences)`.

    Raises:
        UserError: the config is wrong, or there is no such model or device.
    """
    device, loss = _device(device), config.train.loss
    saved = open_model(Path(weights)) if weights is not None else None
    model = plan_run(config).model if saved is None else saved.model
    try_plugins(config, model, device, torch.float32)
    spec = StageSpec(
        model,
        recompute=recompute_of_whole(config, model),
        parts=choose_parts(model, device.type, torch.float32, token_loss=None if loss is None else loss.function()),
        seed=config.run.seed,
    )
    return Stage(spec, None if saved is None else saved.weights).to(device)


def _device(named: torch.device | str) -> torch.device:
    """A device that is here."""
    try:
        device = torch.device(named)
        if device.type not in LOSS_CHUNK_TOKENS:
            raise ValueError("megalite computes on none of this type")
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise UnavailableError(
            f"build_model: found device={str(named)!r}: {why}; use cpu, or cuda where it is"
        ) from error
    return device


def batches(
    config: Config, *, first_step: int = 1, last_step: int | None = None, dp_size: int = 1, dp_rank: int = 0
) -> Iterator[list[Batch]]:
    """The micro-batches of each step, as a run of this config reads them.

    Args:
        first_step: counted from 1.
        last_step: included; None for the run's last.
        dp_size: readers that share each global batch.
        dp_rank: which of them this is.

    Raises:
        UserError: the config is wrong, there is no such step or reader, or the data is damaged or does not fit.
    """
    config = fill_epochs(config)
    plan = plan_run(config)
    last = plan.total_steps if last_step is None else last_step
    problems = [*_wrong_steps(first_step, last, plan.total_steps), *_wrong_share(config, dp_size, dp_rank)]
    if problems:
        raise UserError(f"batches: {'; '.join(problems)}")
    stage, sizes = stage_of_steps(config, first_step, last), batch_sizes(config.batch)
    samples = open_samples_of(stage.config).beginning_at(sizes.first_sample(stage.first_step))
    samples.check_vocab_size(plan.model.vocab_size)
    loader = Loader.for_run(samples, stage.config, sizes, dp_size=dp_size, dp_rank=dp_rank)
    try:
        for _, micro_batches in loader.steps(first_step, last):
            yield micro_batches
    finally:
        loader.close()


def _wrong_steps(first: int, last: int, total: int) -> Iterator[str]:
    """Complain about steps that a run does not have."""
    if first < 1:
        yield f"found first_step={first}, expected 1 or more; steps count from 1"
    elif first > total:
        yield f"found first_step={first}, but the run ends with step {total}"
    elif not first <= last <= total:
        yield f"found last_step={last}, expected {first} (first_step) to {total} (the run's last), or None for that"


def _wrong_share(config: Config, dp_size: int, dp_rank: int) -> Iterator[str]:
    """Complain about readers that there cannot be."""
    if dp_size < 1:
        yield f"found dp_size={dp_size}, expected 1 or more"
    elif not 0 <= dp_rank < dp_size:
        yield f"found dp_rank={dp_rank}, expected 0 to {dp_size - 1}, for dp_size={dp_size}"
    size = config.batch.micro_batch_size
    for span in batch_sizes(config.batch).spans if dp_size > 0 else ():
        if span.size % (dp_size * size):
            yield (
                f"found dp_size={dp_size}, but {dp_size} x batch.micro_batch_size={size} does not divide the "
                f"{span.size} sequences of step {span.first_step}; use {or_(divisors(span.size // size))}"
            )


def loss(model: Stage, micro_batches: Sequence[Batch]) -> Tensor:
    """The mean loss over the valid tokens of some micro-batches, as training counts it; fp32 scalar.

    It is the cross-entropy, or the plug-in's that the model's config names (`train.loss`); without gradients it is the
    cross-entropy in any case, as in validations. With a whole step's at once, activations of all are kept until the
    backward pass.

    Raises:
        UserError: there is no micro-batch, or the model is not whole.
    """
    if not model.spec.has_embedding or not model.spec.has_head:
        raise UserError("loss: found a stage of a pipeline, expected a whole model, as `build_model` makes one")
    if not micro_batches:
        raise UserError(
            "loss: found no micro-batch, expected one or more; `batches` yields a list of them for each step"
        )
    device = next(model.parameters()).device
    found = [batch.to(device) for batch in micro_batches]
    weight = torch.stack([loss_weights(batch).double().sum() for batch in found]).sum()
    scale = 1.0 / torch.where(weight > 0, weight, 1.0).float()
    losses = [model(batch.tokens, documents_of_batch(batch), targets_of_batch(batch, scale)) for batch in found]
    return torch.stack(losses).sum()


def run_training(config: Config, *, stop_after: int | None = None) -> int:
    """Train as `megalite train` does: start the ranks on this machine, or go on with the run that was stopped.

    Args:
        stop_after: stop behind this step, from 1, as if asked to; the next call goes on.

    Returns:
        The exit code: 0 done, 3 stopped.

    Raises:
        UserError: the config, data or run folder are wrong; nothing was started.
    """
    load_plugins(config.plugins)
    config = fill_epochs(config)
    if stop_after is not None and stop_after < 1:
        raise UserError(f"run_training: found stop_after={stop_after}, expected a step, from 1, or None")
    return train_locally(config, default_world_size(config), stop_after=stop_after)
