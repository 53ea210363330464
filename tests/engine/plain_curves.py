"""What plain PyTorch, with models of transformers, makes of the tests' tiny configs; the same for all worlds."""

from __future__ import annotations

from typing import Any

from megalite.config.plan import make_plan
from tests.kit.reference import reference_training
from tests.kit.spawn import run_ranks
from tests.kit.train import tiny_config

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""

_KNOWN: dict[tuple[Any, ...], Curve] = {}


def plain_curves(cases: list[dict], steps: int) -> list[Curve]:
    """The plain curve of each case, in a rank, so that this process never computes; kept for other worlds' cases."""
    keys = [(*what_counts(case), steps) for case in cases]
    missing = {key: case for key, case in zip(keys, cases, strict=True) if key not in _KNOWN}
    if missing:
        found = run_ranks(_train_all, 1, list(missing.values()), steps)[0]
        _KNOWN.update(zip(missing, found, strict=True))
    return [_KNOWN[key] for key in keys]


def what_counts(case: dict) -> tuple[Any, ...]:
    """Of a case, all that its plain curve follows from."""
    config = tiny_config(**case)
    model, batch = make_plan(config, 64).model, config.batch
    size = batch.micro_batch_size if model.moe is not None else None  # which a loss of routers may go by
    updates = config.optimizer.model_dump_json(), config.schedule.model_dump_json(), config.run.seed
    return model, batch.global_batch_size, batch.seq_len, size, *updates


def _train_all(cases: list[dict], steps: int) -> list[Curve]:
    configs = [tiny_config(**case) for case in cases]
    return [reference_training(config, make_plan(config, 64).model, steps) for config in configs]
