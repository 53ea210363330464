"""Pairs of answers: every layout learns from them as plain PyTorch does, against a frozen copy or without adapters."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.plan import make_plan
from megalite.config.schema import Config, ModelConfig
from megalite.data.loader import Batch
from megalite.engine.build import with_preference
from megalite.model.initialize import FreshWeights
from megalite.optim.schedules import learning_rate
from tests.engine.test_layouts import FEW, FSDP2, LOSS_TOLERANCE, NORM_TOLERANCE, layout
from tests.kit.reference import reference_model
from tests.kit.spawn import run_ranks
from tests.kit.train import Rank, start_rank, tiny_config

STEPS = 3
SMALL = {"num_layers": 2}
LORA = {**SMALL, "lora": {"rank": 4, "alpha": 20.0}}
DPO = {"beta": 0.5}


def case(preference: dict[str, Any] = DPO, model: dict[str, Any] = SMALL, **parallel: Any) -> dict[str, Any]:
    return layout(**parallel, more={"model": model, "train": {"preference": preference}, **FEW})


CASES = {
    1: [
        case({"beta": 0.5, "label_smoothing": 0.1, "chosen_nll": 0.3}, zero_stage=0),
        case({"loss": "ipo", "beta": 0.2}),
        case({"loss": "hinge", "beta": 2.0}),
    ],
    2: [
        case(dp=2),
        case(tp=2, sequence_parallel=True),
        case(pp=2, model={**SMALL, "tie_embeddings": True}),
        case(cp=2),
        case(dp=2, **FSDP2),
        case(model=LORA, tp=2),
        case(model=LORA, dp=2, zero_stage=3, engine="deepspeed"),
    ],
}


def pair(index: int, seq_len: int, vocab_size: int) -> list[dict[str, np.ndarray]]:
    """Two documents of one sequence: tokens, and the weight of each as a label."""
    rng = np.random.default_rng([3, index])
    found = []
    for _ in range(2):
        size = rng.integers(4, seq_len // 2 + 1)
        weights = np.where(np.arange(size) >= rng.integers(1, size - 1), rng.choice([1.0, 0.5]), 0.0)
        found.append({"tokens": rng.integers(0, vocab_size, size), "weights": weights})
    return found


def micro_batch(indices: range, seq_len: int, vocab_size: int) -> Batch:
    """Pairs laid end to end, a sequence each, padded as packed data is."""
    shape = len(indices) * seq_len
    tokens, labels, positions = torch.zeros((3, shape), dtype=torch.int64)
    weights = torch.zeros(shape)
    borders = [0]
    for row, index in enumerate(indices):
        place = row * seq_len
        for document in pair(index, seq_len, vocab_size):
            size = document["tokens"].size
            own = slice(place, place + size)
            tokens[own] = torch.from_numpy(document["tokens"])
            weights[place : place + size - 1] = torch.from_numpy(document["weights"][1:]).float()
            labels[place : place + size - 1] = tokens[place + 1 : place + size]
            positions[own] = torch.arange(size)
            place += size
            borders.append(place)
        if place < (row + 1) * seq_len:
            positions[place : (row + 1) * seq_len] = torch.arange((row + 1) * seq_len - place)
            borders.append((row + 1) * seq_len)
    keys = torch.cat([index * seq_len + torch.arange(seq_len) for index in indices])
    mask = weights > 0
    return Batch(
        tokens, labels * mask, mask, positions, torch.tensor(borders, dtype=torch.int32), seq_len, keys, weights=weights
    )


def batches_of(rank: Rank, step: int) -> list[Batch]:
    batch, dp = rank.config.batch, rank.plan.dp
    count = batch.global_batch_size // (batch.micro_batch_size * dp)
    own = step * batch.global_batch_size + rank.axes.batch.rank * batch.micro_batch_size
    firsts = [own + number * dp * batch.micro_batch_size for number in range(count)]
    vocab_size = rank.plan.model.vocab_size
    return [micro_batch(range(f, f + batch.micro_batch_size), batch.seq_len, vocab_size) for f in firsts]


def run(cases: list[dict[str, Any]]) -> list[Any]:
    """Of each case the curve, with the figures of each step, and what a validation of the first batch finds behind
    it."""
    found = []
    for each in cases:
        rank = start_rank(tiny_config(**each))
        weights = FreshWeights(rank.plan.model, rank.config.run.seed)
        device = torch.device("cpu")
        engine = with_preference(rank.engine, rank.config, rank.plan, rank.axes, device, lambda own=weights: own)
        curve = []
        for step in range(STEPS):
            lr = learning_rate(step + 1, rank.plan.total_steps, rank.config.optimizer, rank.config.schedule)
            result = engine.train_step(batches_of(rank, step), lr)
            curve.append((result.loss, result.grad_norm, dict(result.figures)))
        last = engine.eval_step(batches_of(rank, 0))
        engine.close()
        found.append((curve, (last.total / last.weight, last.num_tokens)))
    return found


def log_probability(model: torch.nn.Module, document: dict[str, np.ndarray], *, mean: bool) -> Tensor:
    """The weighted log-probability of what is learnt of a document, by itself."""
    tokens = torch.from_numpy(document["tokens"]).view(1, -1)
    logits = model(input_ids=tokens).logits[0, :-1].double()
    own = F.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:].view(-1, 1)).flatten()
    weights = torch.from_numpy(document["weights"][1:])
    total = (weights * own).sum()
    return total / weights.sum() if mean else total


def pair_cost(policy: torch.nn.Module, frozen: torch.nn.Module, documents: list, settings: Any) -> tuple[Tensor, ...]:
    """The loss of a pair as the papers write it, its margin and both rewards."""
    is_ipo = settings.loss == "ipo"
    of_policy = [log_probability(policy, each, mean=is_ipo) for each in documents]
    with torch.no_grad():
        of_frozen = [log_probability(frozen, each, mean=is_ipo) for each in documents]
    chosen, rejected = (a - b for a, b in zip(of_policy, of_frozen, strict=True))
    margin = chosen - rejected
    if settings.loss == "sigmoid":
        p = torch.sigmoid(settings.beta * margin)
        loss = -(1 - settings.label_smoothing) * torch.log(p) - settings.label_smoothing * torch.log(1 - p)
    elif settings.loss == "hinge":
        loss = torch.clamp(1 - settings.beta * margin, min=0)
    else:
        loss = (margin - 1 / (2 * settings.beta)) ** 2
    if settings.chosen_nll:
        loss = loss - settings.chosen_nll * log_probability(policy, documents[0], mean=True)
    return loss, (margin > 0).double(), settings.beta * chosen.detach(), settings.beta * rejected.detach()


def plain_training(config: Config, model: ModelConfig) -> list[tuple[float, float, dict[str, float]]]:
    """The same by transformers, autograd and AdamW, a document at a time."""
    policy = reference_model(model, config.run.seed)
    frozen, settings = copy.deepcopy(policy), config.train.preference
    trained = [each for each in policy.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if (each.dim() > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, config.optimizer.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=config.optimizer.betas, eps=config.optimizer.eps
    )
    curve = []
    for step in range(STEPS):
        size = config.batch.global_batch_size
        costs = [
            pair_cost(policy, frozen, pair(step * size + row, config.batch.seq_len, model.vocab_size), settings)
            for row in range(size)
        ]
        loss, *figures = (torch.stack(each).mean() for each in zip(*costs, strict=True))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, config.optimizer.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, config.train.steps, config.optimizer, config.schedule)
        optimizer.step()
        names = ("accuracy", "chosen_reward", "rejected_reward")
        curve.append((loss.item(), norm.item(), dict(zip(names, (each.item() for each in figures), strict=True))))
    return curve


def truth(cases: list[dict[str, Any]]) -> list[Any]:
    return [plain_training(tiny_config(**each), make_plan(tiny_config(**each), 2).model) for each in cases]


@pytest.mark.parametrize("world_size", CASES)
def test_every_layout_learns_as_plain_pytorch(world_size):
    """Loss, norm, accuracy and rewards over clipped steps, for each loss, against formulas on transformers' Llama that
    sees one document at a time; a validation counts pairs, and finds that the first batch was learnt."""
    cases = CASES[world_size]
    ranks, expected = run_ranks(run, world_size, cases), run_ranks(truth, 1, cases)[0]
    for number, each in enumerate(cases):
        for own in ranks:
            curve, (loss, num_pairs) = own[number]
            for (mean, norm, figures), (true_mean, true_norm, true_figures) in zip(
                curve, expected[number], strict=True
            ):
                assert mean == pytest.approx(true_mean, abs=LOSS_TOLERANCE), each
                assert norm == pytest.approx(true_norm, rel=NORM_TOLERANCE), each
                assert figures == pytest.approx(true_figures, abs=2e-5), each
            assert num_pairs == 8
            assert loss < curve[0][0] - 1e-3
    assert math.isfinite(loss)
