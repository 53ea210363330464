"""`megalite.loss` refuses what has no loss."""

from __future__ import annotations

import pytest

from megalite.errors import UserError
from megalite.library import loss
from tests.model.stages import make_stage, tiny_model


def test_no_micro_batch_is_refused():
    """A list without a micro-batch is said to be one, not an error of torch's about an int."""
    with pytest.raises(UserError, match="found no micro-batch, expected one or more"):
        loss(make_stage(tiny_model()), [])
