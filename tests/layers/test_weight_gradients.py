"""Products whose weight's gradient somebody else keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.layers.gemm import PlainGemm
from megalite.layers.weight_gradients import SummedLinear, WeightGradient


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_what_a_product_is_given_is_kept_for_its_weight_alone(is_trained: bool):
    """Of a frozen weight nothing is handed over, and its input is not kept; the input's gradient is autograd's."""
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(5, 3, generator=generator), requires_grad=is_trained)
    x = torch.randn(7, 3, generator=generator, requires_grad=True)
    grad = torch.randn(7, 5, generator=generator)
    taken, kept = list[tuple[nn.Parameter, Tensor]](), list[int]()

    def take(parameter: nn.Parameter, made: WeightGradient) -> None:
        taken.append((parameter, made.make()))

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    product = SummedLinear(weight, PlainGemm(), take)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = product.linear(x, weight)
    assert set(kept) == {weight.data_ptr(), *([x.data_ptr()] if is_trained else [])}
    y.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, grad @ weight)
    assert [parameter is weight for parameter, _ in taken] == [True] * is_trained
    assert all(torch.equal(made, grad.t() @ x) for _, made in taken)
