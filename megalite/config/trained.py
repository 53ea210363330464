"""Where a model's backward pass goes, and of which products it makes gradients of weights. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import MOST_KEPT
from megalite.architecture.trained import ALL_GRADIENTS, BlockGradients, TrainedParts, everything
from megalite.architecture.weights import Weight, weight_table
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.config.weight_groups import is_trained


def trained_parts(model: Architecture, optimizer: OptimizerConfig) -> TrainedParts:
    """What a step of a filled model trains."""
    if not any(group.frozen for group in optimizer.groups):
        return everything(model)
    found = _with_frozen(model, optimizer)
    return found if model.lora is None else replace(everything(model), first=found.first)


@lru_cache(maxsize=MOST_KEPT)
def _with_frozen(model: Architecture, optimizer: OptimizerConfig) -> TrainedParts:
    layers: dict[str, list[tuple[Weight, bool]]] = {}
    for weight in weight_table(model).values():
        layers.setdefault(weight.layer, []).append((weight, is_trained(weight.name, optimizer)))
    names = [f"blocks.{index}" for index in range(model.num_layers)]
    names += [f"mtp.{index}" for index in range(model.num_predictions)]
    has_trained = [any(trains for _, trains in layers[name]) for name in ("embedding", *names)]
    first = 0 if has_trained[0] else next((n for n, trained in enumerate(has_trained[1:]) if trained), len(names))
    head = layers.get("head") or layers["embedding"]
    return TrainedParts(first, tuple(_share(layers[name]) for name in names), any(trains for _, trains in head))


@lru_cache(maxsize=MOST_KEPT)
def block_gradients(model: Architecture, optimizer: OptimizerConfig) -> tuple[BlockGradients, ...]:
    """Of every block of a filled model, those that predict further ahead behind the others."""
    if not any(group.frozen for group in optimizer.groups):
        return (ALL_GRADIENTS,) * (model.num_layers + model.num_predictions)
    layers = [f"blocks.{index}" for index in range(model.num_layers)]
    layers += [f"mtp.{index}" for index in range(model.num_predictions)]
    trained: dict[str, list[str]] = {layer: [] for layer in layers}
    for weight in weight_table(model).values():
        if weight.layer in trained and is_trained(weight.name, optimizer):
            trained[weight.layer].append(weight.name)
    return tuple(_block_gradients(names) for names in trained.values())


@lru_cache(maxsize=MOST_KEPT)
def trained_layers(model: Architecture, optimizer: OptimizerConfig) -> frozenset[str]:
    """Layers of a filled model's list in which anything is trained."""
    return frozenset(row.layer for row in weight_table(model).values() if is_trained(row.name, optimizer))


def _block_gradients(names: Iterable[str]) -> BlockGradients:
    """Given what is trained of a block."""
    products = [name for name in names if not name.endswith(".bias") and "_norm." not in name]
    of_mlp = [name for name in products if ".attention." not in name]
    return BlockGradients(
        norms=any(name.endswith("_norm.weight") and ".attention." not in name for name in names),
        entering=any(".attention." in name and ".attention.o." not in name for name in products),
        leaving=any(".attention.o." in name for name in products),
        expanding=any(".down." not in name for name in of_mlp),
        contracting=any(".down." in name for name in of_mlp),
    )


def _share(weights: Iterable[tuple[Weight, bool]]) -> float:
    """Of the numbers of matrices, those that are trained."""
    sizes = [(prod(weight.shape), trains) for weight, trains in weights if weight.is_matrix]
    total = sum(size for size, _ in sizes)
    return sum(size for size, trains in sizes if trains) / total if total else 0.0
