"""The whole model against transformers: logits, loss and every gradient, for every family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megalite.architecture.weights import weight_table
from megalite.layers.documents import Documents, Targets
from megalite.layers.parts import Parts, choose_parts
from megalite.model.initialize import fill, local_weights
from megalite.model.spec import StageSpec
from megalite.model.transformer import Stage, documents_of
from megalite.parallel.axes import Axis, connect
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks
from tests.layers.parity import difference
from tests.model.families import FAMILIES, SEQ_LEN, Family, ReferenceWeights, build_reference, parameters_and_gradients

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative to the largest entry where that exceeds 1. float64: another order of sums; rotary angles are the same fp32
numbers in both projects. float32: rounding through two blocks and back."""

BORDERS = (0, 9, 10, SEQ_LEN)


def inputs(packed: bool) -> tuple[Tensor, Documents, Targets]:
    """A stream of three documents, or of two sequences, with weights that leave tokens out."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(101, (2, SEQ_LEN), generator=generator)
    weights = (torch.rand(SEQ_LEN, generator=generator) < 0.7).float()
    if not packed:
        return tokens, documents_of(tokens.view(2, -1)), Targets(labels, weights)
    borders = torch.tensor(BORDERS)
    positions = torch.cat([torch.arange(length) for length in borders.diff().tolist()])
    return tokens, Documents(positions, borders.int(), SEQ_LEN, torch.arange(SEQ_LEN)), Targets(labels, weights)


def reference_results(family: Family, dtype: torch.dtype, packed: bool) -> tuple[Tensor, Tensor, dict, dict]:
    """transformers' logits and loss, and its parameters and gradients."""
    reference = build_reference(family, dtype)
    tokens, documents, targets = inputs(packed)
    if packed:
        owner = torch.bucketize(torch.arange(SEQ_LEN), documents.cu_seqlens[1:], right=True)
        seen = (owner.unsqueeze(1) == owner) & torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        more = {"attention_mask": mask[None, None], "position_ids": documents.positions[None]}
        logits = reference(input_ids=tokens[None], use_cache=False, **more).logits[0]
    else:
        logits = reference(input_ids=tokens.view(2, -1), use_cache=False).logits.flatten(0, 1)
    nll = F.cross_entropy(logits, targets.labels, reduction="none")
    loss = (nll * targets.weights).sum()
    loss.backward()
    return logits.detach(), loss.detach(), *parameters_and_gradients(reference)


def compare(family: Family, tp: Axis, dtype: torch.dtype, *, packed: bool, sequence_parallel: bool) -> dict[str, float]:
    """Differences of logits, loss and every canonical weight's gradient on this rank."""
    logits, loss, parameters, gradients = reference_results(family, dtype, packed)
    model = family.model
    parts = replace(Parts(), norm=choose_parts(model, "cpu", dtype).norm)
    spec = StageSpec(model, tp=tp, sequence_parallel=sequence_parallel, parts=parts)
    stage = Stage(spec).to(dtype)
    fill(stage, ReferenceWeights(family, parameters))
    tokens, documents, targets = inputs(packed)
    with torch.no_grad():
        own_logits = stage.logits(tokens, documents)
    own_loss = stage(tokens, documents, targets)
    own_loss.backward()
    first = stage.head.first_row
    differences = {
        "logits": difference(own_logits, logits[:, first : first + own_logits.shape[1]]),
        "loss": difference(own_loss.detach(), loss),
    }
    own = dict(stage.named_parameters())
    for local in local_weights(stage):
        expected = family.find(gradients, local.weight.name, model)[local.rectangle.slices]
        differences[local.weight.name] = difference(local.view(own[local.parameter_name].grad), expected)
    assert set(differences) == {"logits", "loss", *weight_table(model)}
    return differences


def compare_families(names: list[str]) -> list[str]:
    tp = connect(Mesh(tp=dist.get_world_size()), dist.get_rank()).tp
    wrong = []
    for name in names:
        family = FAMILIES[name]
        for dtype in family.dtypes:
            for packed in (False, True) if family.packs else (False,):
                for sequence_parallel in (False, True) if tp.size > 1 else (False,):
                    options = {"packed": packed, "sequence_parallel": sequence_parallel}
                    differences = compare(family, tp, dtype, **options)
                    bad = {key: f"{value:.1e}" for key, value in differences.items() if not value <= TOLERANCES[dtype]}
                    if bad:
                        wrong.append(f"{name}, {dtype}, {options}, rank {tp.rank} of {tp.size}: {bad}")
    return wrong


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_model_equals_transformers(name, tp):
    """Logits, loss and the gradient of every weight are those of transformers' model with the same weights, whole
    sequences and packed documents, at tp 1, tp 2 and tp 2 with sequence parallelism, in float64 and float32."""
    wrong = [line for lines in run_ranks(compare_families, tp, [name]) for line in lines]
    assert not wrong, "\n".join(wrong)
