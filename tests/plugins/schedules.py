"""A rate that falls in straight lines from the peak and starts again, some times over the run."""

from megalite import extend


@extend.schedule("sawtooth")
def sawtooth(k: int, n: int, peak: float, min_lr: float, *, teeth: int = 4) -> float:
    length = n / teeth
    return peak - (peak - min_lr) * ((k - 1) % length) / length
