"""The plateau rule against torch's ReduceLROnPlateau."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megalite.config.schema import PlateauConfig
from megalite.optim.adaptive import Plateau, after_validation


@pytest.mark.parametrize("cooldown", [0, 3])
@pytest.mark.parametrize("patience", [0, 2])
@pytest.mark.parametrize("threshold", [0.0, 0.02])
def test_cuts_as_torch_does(patience, threshold, cooldown):
    """Over noisy falling losses, the rate is cut after the very same validations."""
    draw = random.Random(patience + 10 * cooldown)
    losses = [3.0 * math.exp(-step / 40) + draw.gauss(0.0, 0.05) for step in range(200)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=patience, threshold=threshold, cooldown=cooldown, eps=0.0
    )
    settings, state = PlateauConfig(patience=patience, threshold=threshold, cooldown=cooldown), Plateau()
    for loss in losses:
        theirs.step(loss)
        state = after_validation(state, loss, settings)
        assert 0.5**state.num_cuts == optimizer.param_groups[0]["lr"]
    assert state.num_cuts > 2


@pytest.mark.parametrize("first", [math.nan, math.inf, -math.inf])
def test_a_first_loss_that_is_not_finite(first):
    """Is as torch takes it: no bar for those to come."""
    settings, state = PlateauConfig(patience=1, threshold=0.0, cooldown=0), Plateau()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.0, eps=0.0)
    for loss in (first, 3.3, 3.2, 3.1, 3.0, math.nan, 2.9, 3.5, 3.4):
        theirs.step(loss)
        state = after_validation(state, loss, settings)
        assert 0.5**state.num_cuts == optimizer.param_groups[0]["lr"]


def test_a_loss_that_is_not_a_number_is_no_best():
    """It counts as a validation that did not help."""
    state = after_validation(Plateau(best=1.0), math.nan, PlateauConfig(patience=0))
    assert (state.num_cuts, state.best) == (1, 1.0)
