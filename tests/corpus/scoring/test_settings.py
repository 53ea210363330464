"""Settings of the scores: one way to get a model and one way to choose, or a clear refusal."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megalite.corpus.scoring.settings import ClassifierConfig, PerplexityConfig


def test_what_is_complete_is_accepted():
    """Each way of choosing, with a model or with samples."""
    assert PerplexityConfig(model="m", max_perplexity=900).keep_fraction is None
    assert PerplexityConfig(train_on=["a.txt", "b"], keep_fraction=0.3).order == 5
    for choice in ({"min_score": 0.0}, {"keep_fraction": 0.1}, {"pareto_alpha": 9}):
        assert ClassifierConfig(good=["g"], bad=["b"], **choice).model is None
        assert ClassifierConfig(model="m.npz", **choice).good == ()


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (PerplexityConfig, {"max_perplexity": 9}, "either model or train_on; found neither"),
        (
            PerplexityConfig,
            {"model": "m", "train_on": ["a"], "max_perplexity": 9},
            "either model or train_on; found both",
        ),
        (PerplexityConfig, {"model": "m"}, "either max_perplexity or keep_fraction; found neither"),
        (PerplexityConfig, {"model": "m", "keep_fraction": 0}, "greater than 0"),
        (PerplexityConfig, {"train_on": ["a"], "keep_fraction": 0.5, "prune": [1, 0]}, "must not fall"),
        (ClassifierConfig, {"good": ["g"], "min_score": 0.5}, "good and bad belong together"),
        (ClassifierConfig, {"min_score": 0.5}, "either model or good and bad; found neither"),
        (ClassifierConfig, {"model": "m"}, "exactly one of min_score, keep_fraction, pareto_alpha"),
        (ClassifierConfig, {"model": "m", "min_score": 0.5, "pareto_alpha": 9}, "exactly one of"),
    ],
)
def test_what_contradicts_itself_is_refused(section, values, message):
    """With a sentence that says what to set."""
    with pytest.raises(ValidationError, match=message):
        section(**values)
