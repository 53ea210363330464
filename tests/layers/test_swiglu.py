"""SwiGLU's gradient written out, against autograd's of the two lines that say what it is."""

from __future__ import annotations

import pytest
import torch

from megalite.layers.swiglu import OneKernelSwiglu, swiglu, swiglu_of


def both(x: torch.Tensor, function) -> tuple[torch.Tensor, torch.Tensor]:
    """The product and the gradient of its weighted sum."""
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    (y * weights).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(5, 14), (1, 2), (3, 4096)])
def test_gradient_is_that_of_autograd(shape, compiled):
    """In fp64, where the formula has nowhere to hide; inside a compiled graph too."""
    x = 3 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    function = torch.compile(OneKernelSwiglu.apply, backend="aot_eager") if compiled else OneKernelSwiglu.apply
    found, wanted = both(x, function), both(x, lambda x: swiglu(*x.chunk(2, dim=-1)))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_extremes_stay_finite():
    """Where the sigmoid is 0 or 1."""
    x = torch.tensor([[-1e4, 1e4, 3.0, -3.0]])
    assert all(torch.isfinite(part).all() for part in both(x, OneKernelSwiglu.apply))


def test_a_cpu_takes_the_plain_form():
    x = torch.randn(4, 8)
    assert torch.equal(swiglu_of(x), swiglu(*x.chunk(2, dim=-1)))
