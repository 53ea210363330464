"""A norm that divides by the mean magnitude. RMSNorm gives the weight, and its gradient under sequence parallelism."""

from torch import Tensor

from megalite import extend
from megalite.layers.norm import RMSNorm


@extend.norm("magnitude_norm")
class MagnitudeNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.share(self.weight, self.tp)
        wide = x.float()
        return weight * (wide / (wide.abs().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
