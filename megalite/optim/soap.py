"""SOAP (Vyas et al. 2024, algorithm 3): Adam in the eigenbasis of Shampoo's preconditioners.

    G' = Ql' G Qr                    the gradient in the basis; M' = Ql' M Qr is the first moment there
    V  = b2 V + (1 - b2) G'^2        the second moment is kept in the basis, whichever that is at the time
    W  = W - lr Ql (M' / sqrt(V)) Qr'
    L  = b2 L + (1 - b2) G G'        R = b2 R + (1 - b2) G' G
    Q  = qr(L Q), qr(R Q)            every `precondition_every` steps: one power iteration for all eigenvectors

A side of a matrix longer than `max_precondition_dim` is not turned (Q = I); with both sides so long this is AdamW. The
first step makes the bases alone and moves no matrix: in the basis of its own gradient all off the diagonal would be
rounding, which Adam would blow up to whole steps. Bias corrections count from the second step.

Where the paper leaves room, what is chosen holds in every layout. An eigensolver's vectors are arbitrary where
eigenvalues are equal, as the many zeros of a first gradient are, and Adam's update depends on them. So the first bases
are power iterations too, from the identity, and the matrix that is iterated has `DAMPING` of its mean eigenvalue added,
which leaves its eigenvectors alone: each basis is then a smooth function of the gradients, and sums in another order
change it by no more than rounding. The sign of an eigenvector means nothing to the update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle
from megalite.config.schema import OptimizerConfig
from megalite.optim.exchange import Unit
from megalite.optim.rules import QR_COST, SOAP_SIDES
from megalite.optim.whole import Placed, WholeRule, all_of

DAMPING = 1e-2
"""Of the mean eigenvalue: directions with far less of the gradient stay unsorted among themselves."""

FIRST_ITERATIONS = 10
"""That make the first bases."""


class Soap(WholeRule):
    """See the module. All state of a matrix lives with the owner of its unit."""

    def __init__(self, optimizer: OptimizerConfig):
        self.betas, self.eps = optimizer.betas, optimizer.eps
        self.every, self.max_dim = optimizer.precondition_every, optimizer.max_precondition_dim
        self._states: dict[tuple[str, int], dict[str, Tensor]] = {}

    def cost(self, unit: Unit) -> float:
        turned = [side for side in unit.shape if side <= self.max_dim]
        rows, columns = unit.shape
        products = sum(4.0 * rows * columns * side for side in turned)
        return rows * columns + products + sum(QR_COST * side**3 for side in turned) / self.every

    def start(self, unit: Unit, device: torch.device) -> None:
        state = {kind: torch.zeros(unit.shape, device=device) for kind in ("exp_avg", "exp_avg_sq_turned")}
        for side, (covariance, basis) in zip(unit.shape, SOAP_SIDES, strict=True):
            if side <= self.max_dim:
                state[covariance], state[basis] = (torch.zeros(side, side, device=device) for _ in range(2))
        self._states[unit.weight.name, unit.replica] = state

    def direction(self, unit: Unit, whole: Tensor, step: int) -> Tensor:
        state = self._states[unit.weight.name, unit.replica]
        direction = self._adam(state, whole, step - 1) if step > 1 else torch.zeros_like(whole)
        for gradient, (covariance, basis) in zip((whole, whole.t()), SOAP_SIDES, strict=True):
            if basis not in state:
                continue
            state[covariance].lerp_(gradient @ gradient.t(), 1.0 - self.betas[1])
            if step == 1:
                state[basis].copy_(torch.eye(len(gradient), device=gradient.device))
                for _ in range(FIRST_ITERATIONS):
                    _refresh(state[basis], state[covariance])
            elif step % self.every == 0:
                _refresh(state[basis], state[covariance])
        return direction

    def _adam(self, state: dict[str, Tensor], gradient: Tensor, step: int) -> Tensor:
        """Adam's direction, made in the bases and turned back."""
        left, right = (state.get(basis) for _, basis in SOAP_SIDES)
        mean, square = state["exp_avg"], state["exp_avg_sq_turned"]
        mean.lerp_(gradient, 1.0 - self.betas[0])
        square.lerp_(_turned(gradient, left, right).square_(), 1.0 - self.betas[1])
        corrections = [1.0 - beta**step for beta in self.betas]
        denominator = (square / corrections[1]).sqrt_().add_(self.eps)
        turned = (_turned(mean, left, right) / corrections[0]).div_(denominator)
        return _turned(turned, None if left is None else left.t(), None if right is None else right.t())

    def state(self, unit: Unit) -> Placed:
        tensors = self._states[unit.weight.name, unit.replica]
        return {kind: (all_of(tensor), tensor) for kind, tensor in tensors.items()}

    def load(self, unit: Unit, read: Callable[[str, Rectangle, tuple[int, ...]], Tensor]) -> None:
        for kind, (place, tensor) in self.state(unit).items():
            tensor.copy_(read(kind, place, tuple(tensor.shape)))


def _turned(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """`left' matrix right`, a new tensor; None for no turn."""
    result = matrix if left is None else left.t() @ matrix
    return result.clone() if right is None else result @ right


def _refresh(basis: Tensor, covariance: Tensor) -> None:
    """One power iteration of a basis towards the eigenvectors, in place; a matrix of zeros leaves it."""
    mean = covariance.diagonal().mean()
    iterated = torch.addmm(basis, covariance / torch.where(mean > 0, mean, 1.0), basis, beta=DAMPING)
    basis.copy_(torch.linalg.qr(iterated)[0])
