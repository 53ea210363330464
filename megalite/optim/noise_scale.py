"""The gradient noise scale: how large a batch still pays (McCandlish et al. 2018, "An empirical model of large-batch
training", appendix A.1).

The gradient of a batch of B tokens is the true one, G, plus noise whose variance summed over all weights is S / B. So

    E |gradient of B tokens|^2 = |G|^2 + S / B

and the mean square at two batch sizes gives both. A step has the two for free: its micro-batches and its whole. Their
ratio S / |G|^2 is the simple noise scale, in tokens: with batches far below it, twice the batch halves the steps; far
above it, a larger batch gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Squares:
    """Squared norms of gradients that are means over tokens, at two batch sizes."""

    small: float
    """Mean over the micro-batches."""
    inverse_small: float
    """Mean of 1 / tokens of a micro-batch: right also where masks leave them unequal."""
    large: float
    """Of the whole batch."""
    inverse_large: float
    """1 / its tokens."""


@dataclass(frozen=True)
class NoiseScale:
    """Running means over the measurements of a run; single ones are so noisy that only the ratio of means is of use."""

    gradient: float = 0.0
    """|G|^2, short of its weight."""
    noise: float = 0.0
    """S, short of the same weight, which falls out of the ratio."""
    num_measurements: int = 0
    num_since_growth: int = 0
    """Measurements since the batch has grown, or since the start."""

    @property
    def tokens(self) -> float | None:
        """The noise scale; None as long as the gradient cannot be told from its noise."""
        return self.noise / self.gradient if self.gradient > 0.0 and self.noise > 0.0 else None

    def exceeds(self, num_tokens: int) -> bool:
        """Whether the noise scale is above a batch; so it is, too, when there is no telling the gradient from noise."""
        return self.noise > 0.0 and self.noise > num_tokens * self.gradient


def separate(squares: Squares) -> tuple[float, float]:
    """|G|^2 and S of one measurement, both without bias; either may come out negative."""
    noise = (squares.small - squares.large) / (squares.inverse_small - squares.inverse_large)
    return squares.large - noise * squares.inverse_large, noise


def updated(state: NoiseScale, squares: Squares, smoothing: float) -> NoiseScale:
    """The running means with one more measurement, former ones weighted by `smoothing`."""
    gradient, noise = separate(squares)
    return NoiseScale(
        smoothing * state.gradient + (1.0 - smoothing) * gradient,
        smoothing * state.noise + (1.0 - smoothing) * noise,
        state.num_measurements + 1,
        state.num_since_growth + 1,
    )
