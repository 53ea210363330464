"""The focal loss (Lin et al. 2017): tokens that are predicted well already count less."""

from torch import Tensor

from megalite import extend


@extend.loss("focal")
def focal(logits: Tensor, labels: Tensor, *, gamma: float = 2.0) -> Tensor:
    log_p = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    return -((1.0 - log_p.exp()) ** gamma) * log_p
