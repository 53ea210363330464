"""The bands that follow from a threshold, and the S-curve, against counting every way two signatures can agree."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megalite.corpus.near.curve import agreements_needed, collision_probability, removal_probability, s_curve
from megalite.corpus.near.settings import MIN_RECALL, NearDedupConfig, derive_banding, recall_point


def test_default_bands():
    """The numbers that the documentation names."""
    config = NearDedupConfig()
    assert config.banding == (32, 8)
    assert collision_probability(0.8, 32, 8) == pytest.approx(0.997, abs=5e-4)
    assert collision_probability(0.8, 28, 9) == pytest.approx(0.982, abs=5e-4)


@given(st.floats(0.05, 1.0), st.integers(100, 1024))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_derived_bands_reach_the_recall_with_the_most_rows(threshold, num_hashes):
    """The promised recall is reached, the signature suffices, and one more row would miss the recall."""
    bands, rows = derive_banding(threshold, num_hashes)
    similarity = recall_point(threshold)
    assert bands * rows <= num_hashes
    assert collision_probability(similarity, bands, rows) >= MIN_RECALL
    for more in range(rows + 1, num_hashes + 1):
        assert collision_probability(similarity, num_hashes // more, more) < MIN_RECALL


@pytest.mark.parametrize(("bands", "rows", "num_hashes"), [(2, 2, 5), (3, 2, 6), (1, 4, 7), (4, 1, 4), (2, 3, 8)])
@pytest.mark.parametrize("similarity", [0.0, 0.3, 0.7, 1.0])
def test_curves_count_every_way_to_agree(bands, rows, num_hashes, similarity):
    """Both curves equal the sum over all patterns of agreeing and differing values."""
    threshold = 0.6
    meet = remove = 0.0
    for pattern in itertools.product([0, 1], repeat=num_hashes):
        probability = similarity ** sum(pattern) * (1 - similarity) ** (num_hashes - sum(pattern))
        whole = any(all(pattern[band * rows : (band + 1) * rows]) for band in range(bands))
        meet += probability * whole
        remove += probability * (whole and sum(pattern) / num_hashes >= threshold)
    assert collision_probability(similarity, bands, rows) == pytest.approx(meet, abs=1e-12)
    found = removal_probability(similarity, bands, rows, num_hashes=num_hashes, threshold=threshold)
    assert found == pytest.approx(remove, abs=1e-12)


def test_s_curve_runs_from_0_to_1():
    """It has the points asked for, rises, and ends at certainty."""
    curve = s_curve(32, 8, 11)
    assert [similarity for similarity, _ in curve] == pytest.approx([i / 10 for i in range(11)])
    probabilities = [probability for _, probability in curve]
    assert probabilities == sorted(probabilities)
    assert (probabilities[0], probabilities[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("verify", ["signature", "jaccard", "none"])
def test_drawing_shows_the_curve_of_the_settings(verify):
    """Each line has the similarity, both probabilities, and bars of their lengths."""
    config = NearDedupConfig(verify=verify)
    title, _, *lines = config.draw().splitlines()
    assert title == "32 bands of 8 rows"
    assert len(lines) == 21
    for line in lines:
        similarity, meet, removed, *bar = line.split()
        assert float(meet) == pytest.approx(collision_probability(float(similarity), 32, 8), abs=6e-4)
        assert float(removed) == pytest.approx(config.removal_probability(float(similarity)), abs=6e-4)
        assert "".join(bar).count("#") == pytest.approx(40 * float(removed), abs=0.6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bands": 4}, "set both"),
        ({"bands": 30, "rows": 9}, "more than num_hashes=256"),
        ({"num_hashes": 2}, "raise num_hashes"),
        ({"threshold": 0.0}, "greater than 0"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    """The message says what to do."""
    with pytest.raises(ValidationError, match=message):
        NearDedupConfig(**values)


def test_agreements_needed_is_exact():
    """The least count whose share reaches the threshold, also where the product is not exact in binary."""
    for num_hashes in (10, 100, 256):
        for count in range(1, num_hashes + 1):
            assert agreements_needed(count / num_hashes, num_hashes) == count
    assert agreements_needed(0.7, 256) == 180
