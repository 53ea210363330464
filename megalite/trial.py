"""Plug-ins that a model is made of, tried on a few numbers before they are trained with.

What an activation, a norm, an attention, a loss or an optimizer returns is held against what training will
do with it: shape, format, finite numbers, gradients, and that attention looks neither ahead nor into another document.
On the device and in the format of the run, since a kernel may know no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalite.addition import Addition, load, made
from megalite.architecture.activations import ACTIVATIONS
from megalite.architecture.architecture import Architecture
from megalite.architecture.attentions import ATTENTIONS
from megalite.architecture.norms import NORMS
from megalite.config.brought import LOSSES
from megalite.config.optimizers import OPTIMIZERS, RULES
from megalite.config.schema import Config
from megalite.errors import UserError
from megalite.layers.documents import Documents
from megalite.parallel.axes import SINGLE
from megalite.plugins import PluginError, Table, place_of

LENGTHS = (80, 48)
"""Tokens of the documents that are tried."""

NUM_LABELS = 16

WIDTH = 64
SEED = 7
SHIFT = 100.0
"""How far a token is moved, so that a mean over all tokens is moved with it."""
CLOSE = 0.05
"""How far a later token may move an earlier one's result, of its size: kernels round."""


def try_plugins(config: Config, model: Architecture, device: torch.device, dtype: torch.dtype) -> None:
    """Try all that a config takes from plug-ins for a model.

    Args:
        model: filled.
        dtype: of the stream between layers.

    Raises:
        PluginError: one fails, or returns what cannot be trained with.
    """
    tokens = sum(LENGTHS)
    draw = _Draw(device, dtype)
    with _trying(ACTIVATIONS, model.activation, "model.activation", device) as entry:
        if entry is not None:
            inputs = [draw(tokens, WIDTH) for _ in range(2 if entry.is_gated else 1)]
            _try(load(entry.function), inputs, (tokens, WIDTH))
    with _trying(NORMS, model.norm, "model.norm", device) as entry:
        if entry is not None:
            module = load(entry.module)(WIDTH, model.norm_eps, tp=SINGLE, sequence_parallel=False)
            for weight in module.parameters():
                torch.nn.init.ones_(weight)
            _try(module.to(device, dtype), [draw(tokens, WIDTH)], (tokens, WIDTH))
    with _trying(ATTENTIONS, model.attention, "model.attention", device) as entry:
        for window in {block.attention.window for block in model.blocks} if entry is not None else ():
            _try_attention(load(entry.function), model, window, draw)
    if config.train.loss is not None:
        with _trying(LOSSES, config.train.loss.name, "train.loss", device) as entry:
            if entry is not None:
                labels = torch.arange(NUM_LABELS, device=device) % model.vocab_size
                measure = entry.bound(config.train.loss.options)
                logits = _Draw(device, torch.float32)(NUM_LABELS, model.vocab_size)
                _try(lambda logits: measure(logits, labels), [logits], (NUM_LABELS,))
    for name in OPTIMIZERS[config.optimizer.name].rules:
        with _trying(RULES, name, "optimizer.name", device) as entry:
            if entry is not None and isinstance(entry.make, Addition):
                options = config.optimizer.options if name == config.optimizer.name else {}
                rule = made(f"optimizer.name: {name}", entry.make.bound(options))
                _try_rule(rule, entry.state, device)


class _Draw:
    """Numbers that are the same everywhere."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator().manual_seed(SEED)

    def __call__(self, *shape: int) -> Tensor:
        found = torch.randn(shape, generator=self._generator).to(self._device, self._dtype)
        return found.requires_grad_()


@contextmanager
def _trying(table: Table[Any], name: str, key: str, device: torch.device) -> Iterator[Any]:
    """An entry of a plug-in, None where it is megalite's; what fails is told with its name, file and line."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield table[name] if table.is_brought(name) else None
    except UserError:
        raise
    except Exception as error:
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise PluginError(
            f"{key}: {name} of {table.origin(name)} was tried on a few numbers before training: {what}"
            f"{place_of(error)}; mend the plug-in"
        ) from error


def _try(call: Callable[..., Any], inputs: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """What code makes of some numbers, when it can be trained with.

    Raises:
        ValueError: it cannot.
    """
    torch.manual_seed(SEED)
    found = call(*inputs)
    if not isinstance(found, Tensor):
        raise ValueError(f"it returned {found!r}, expected a tensor")
    if found.shape != shape or found.dtype != inputs[0].dtype:
        raise ValueError(
            f"it returned a tensor {list(found.shape)} of {found.dtype}, expected {list(shape)} of {inputs[0].dtype}"
        )
    if not found.isfinite().all():
        raise ValueError("it returned numbers that are not finite")
    if not found.requires_grad:
        raise ValueError("its result has no gradient; compute it by differentiable operations of what it is given")
    gradients = torch.autograd.grad(found.float().sum(), inputs, allow_unused=True)
    if not all(each is None or each.isfinite().all() for each in gradients):
        raise ValueError("it has a gradient that is not finite")
    return found.detach()


def _try_attention(call: Callable[..., Any], model: Architecture, window: int | None, draw: _Draw) -> None:
    """Two documents; then with another last token of the first."""
    heads = model.num_heads // model.num_kv_heads
    inputs = [draw(sum(LENGTHS), number, model.head_dim) for number in (2 * heads, 2, 2)]
    shape = (sum(LENGTHS), 2 * heads, model.head_dim)
    device, last = inputs[0].device, LENGTHS[0] - 1
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    borders = torch.tensor((0, LENGTHS[0], sum(LENGTHS)), dtype=torch.int32)
    keys = torch.arange(sum(LENGTHS), device=device)

    def attend(*given: Tensor) -> Any:
        documents = Documents(positions, borders.to(device), max(LENGTHS), keys, borders=borders)
        return call(*given, documents, window)

    with torch.no_grad():
        others = [each.clone() for each in inputs]
        for each in others:
            each[last] = SHIFT - each[last]
    before = _try(attend, inputs, shape)
    after = _try(attend, [each.requires_grad_() for each in others], shape)
    moved = (after - before).abs().amax(dim=(1, 2)).float() > CLOSE * before.abs().amax().float()
    if moved[:last].any():
        raise ValueError("it looks ahead: another last token of a document changed the result of one before it")
    if moved[last + 1 :].any():
        raise ValueError("it looks into another document: a token of the first changed the result of the second")


def _try_rule(rule: Any, state: tuple[str, ...], device: torch.device) -> None:
    """Two updates of two tensors; a `WholeRule` needs its weights, and is left to them."""
    if not hasattr(rule, "update"):
        return
    draw = _Draw(device, torch.float32)
    weights = [draw(size).detach() for size in (12, WIDTH)]
    states = {name: [torch.zeros_like(each) for each in weights] for name in state}
    kept = [*weights, *(each for name in state for each in states[name])]
    shapes = [each.shape for each in kept]
    for step in (1, 2):
        gradients = [draw(len(each)).detach() for each in weights]
        with torch.no_grad():
            rule.update(weights, gradients, states, lr=1e-3, decay=0.1, step=step)
        given = [*weights, *(each for name in state for each in states[name])]
        if any(new is not old for new, old in zip(given, kept, strict=True)):
            raise ValueError("update put other tensors into its lists; change those that are there in place")
        if [each.shape for each in kept] != shapes or not all(math.isfinite(each.sum()) for each in kept):
            raise ValueError(f"update {step} made numbers that are not finite, or tensors of another shape")
