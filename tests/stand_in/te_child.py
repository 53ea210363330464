"""Transformer Engine's own Python beside our emulation, on a device that is none; asked by `test_te`.

The question is the library of the device; the answer says how far results and gradients lie apart (the norm of the
difference over the norm) and which products the library made.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stand_in.cuda import pretend

RECIPES = {"current": "Float8CurrentScaling", "delayed": "DelayedScaling", "block": "Float8BlockScaling"}
"""Ours, and theirs."""

NUM_STEPS = 4

TOKENS, INPUTS, OUTPUTS = 128, 256, 128

NUM_LAYERS, SEQ_LEN, NUM_DOCUMENTS, VOCAB = 2, 64, 2, 101

HISTORY = {"amax_history_len": 3, "margin": 1}
"""Of the delayed recipe: short enough for a maximum to be forgotten."""


def main(library: str) -> dict[str, Any]:
    """All comparisons."""
    device = pretend(Path(library))
    import torch

    from tests.stand_in.te_extension import load

    torch.set_num_threads(1)
    load()
    answer: dict[str, Any] = {"layers": {name: _layers(name) for name in RECIPES}}
    kinds = ("none", "selective", "full")
    answer["stages"] = {f"{name} {kind}": _stages(name, kind) for name in ("current", "block") for kind in kinds}
    del device
    return answer


def _distance(found: Any, expected: Any) -> float:
    found, expected = found.detach().cpu().float(), expected.detach().cpu().float()
    return ((found - expected).norm() / expected.norm()).item()


def _drawn(*shape: int, seed: int) -> Any:
    import torch

    from tests.layers.fp8.kit import draw

    return draw(*shape, seed=seed, dtype=torch.bfloat16).cuda()


def _layers(name: str) -> list[dict[str, float]]:
    """A layer over some steps, each with inputs of another size, so that a history matters."""
    import torch
    from transformer_engine import pytorch as te
    from transformer_engine.common import recipe

    options = HISTORY if name == "delayed" else {}
    settings = recipe.__dict__[RECIPES[name]](**options)
    theirs = te.Linear(INPUTS, OUTPUTS, bias=False, params_dtype=torch.bfloat16, device="cuda")
    ours, end_step = _our_layer(name, options)
    steps = []
    for step in range(NUM_STEPS):
        x, grad = (_drawn(TOKENS, width, seed=step) / 2**step for width in (INPUTS, OUTPUTS))
        weight = _drawn(OUTPUTS, INPUTS, seed=step) / 4**step
        with torch.no_grad():
            theirs.weight.copy_(weight)
        theirs.weight.grad = None
        wanted = x.clone().requires_grad_()
        with te.autocast(enabled=True, recipe=settings):
            y = theirs(wanted)
        y.backward(grad)
        expected = {"y": y, "dx": wanted.grad, "dw": theirs.weight.grad}
        found = _run(ours, x, weight, grad)
        end_step()
        steps.append({key: _distance(found[key], expected[key]) for key in expected})
    return steps


def _run(layer: Any, x: Any, weight: Any, grad: Any) -> dict[str, Any]:
    from tests.layers.fp8.kit import run

    return run(layer, x, weight, grad)


def _our_layer(name: str, options: dict[str, int]) -> tuple[Any, Callable[[], None]]:
    """Our emulation of a recipe, and what ends a step."""
    import torch

    from megalite.config.schema import Fp8Config
    from megalite.layers.fp8.backends import OwnBackend
    from megalite.layers.linear import ColumnParallelLinear
    from megalite.parallel.axes import SINGLE

    config = Fp8Config(backend="emulate", recipe=name, **options)
    backend = OwnBackend(config, tp=SINGLE, replicas=SINGLE, device=torch.device("cuda", 0), keep_weights=False)
    layer = ColumnParallelLinear(INPUTS, OUTPUTS, tp=SINGLE)
    return backend.make_layers({"layer": layer})["layer"], backend.end_step


def _stages(name: str, kind: str) -> dict[str, Any]:
    """A whole stage through the library and through our emulation: two steps of two micro-batches, other weights in the
    second."""
    import torch

    from tests.stand_in.te_extension import multiplied

    theirs, ours = _make_stage("te", name, kind), _make_stage("emulate", name, kind)
    multiplied.clear()
    worst, losses = 0.0, 0.0
    for _ in range(2):
        found = [_micro_batches(stage) for stage in (theirs, ours)]
        losses = max(losses, max(abs(one - other) for one, other in zip(*found, strict=True)))
        pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
        worst = max(worst, *(_distance(one.grad, other.grad) for one, other in pairs))
        for stage in (theirs, ours):
            with torch.no_grad():
                for weight in stage.parameters():
                    weight.mul_(1.25)
                    weight.grad = None
            stage.precision.end_step()
    return {"loss": losses, "gradients": worst, "products": Counter(multiplied)}


def _make_stage(backend: str, name: str, kind: str) -> Any:
    import torch

    from megalite.config.schema import Fp8Config
    from megalite.layers.fp8.backends import choose_backend
    from megalite.layers.fp8.precision import Fp8
    from megalite.layers.parts import Parts
    from megalite.model.initialize import FreshWeights, fill
    from megalite.model.spec import StageSpec
    from megalite.model.transformer import Stage
    from megalite.parallel.axes import SINGLE
    from tests.layers.small import small_model

    model, device = small_model(hidden_size=128, ffn_hidden_size=256), torch.device("cuda", 0)
    config = Fp8Config(backend=backend, recipe=name)
    made = choose_backend(config, tp=SINGLE, replicas=SINGLE, device=device, keep_weights=True)
    parts = Parts(precision=Fp8(config, NUM_LAYERS, made))
    stage = Stage(StageSpec(model, recompute=kind, parts=parts))
    fill(stage, FreshWeights(model, 1))
    return stage.to(device).bfloat16()  # as DeepSpeed does, after the library has taken the weights


def _micro_batches(stage: Any) -> list[float]:
    import torch

    from megalite.layers.documents import Targets
    from megalite.model.transformer import documents_of

    losses = []
    for micro in range(2):
        tokens = (torch.arange(NUM_DOCUMENTS * SEQ_LEN) * (7 + 4 * micro) % VOCAB).cuda()
        targets = Targets(tokens.roll(-1), torch.full((len(tokens),), 1 / len(tokens)).cuda())
        loss = stage(tokens, documents_of(tokens.reshape(NUM_DOCUMENTS, SEQ_LEN)), targets)
        loss.backward()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.read())["library"])), flush=True)
    os._exit(0)  # torch's threads may still run, and a process that ends beside them aborts
