"""Which parameters stay as they are is the same on every rank, whatever a process's hashes are."""

from __future__ import annotations

from megalite.engine.still import still_and_trained
from tests.kit.spawn import run_ranks
from tests.kit.train import start_rank, tiny_config

FROZEN = {"groups": [{"match": ["embedding.*", "blocks.0.*", "blocks.1.*"], "frozen": True}]}


def trained_of_a_still_stage() -> list[str]:
    """Names of what counts as trained on this rank's stage."""
    rank = start_rank(tiny_config(model={"num_layers": 4}, optimizer=FROZEN, parallel={"pp": 2}))
    names = {parameter: name for name, parameter in rank.engine.stage.named_parameters()}
    return [names[parameter] for parameter in still_and_trained(rank.engine.stage, rank.config.optimizer)[1]]


def test_a_stage_without_anything_to_train_goes_through_its_last_small_parameter():
    """All norms of two frozen blocks are equally small: the last one, so that nothing is kept for what is below."""
    first, second = run_ranks(trained_of_a_still_stage, 2)
    assert first == ["blocks.1.mlp_norm.weight"]
    assert len(second) > 1
