"""Softmax of logits and the gradient in their place: kernels against the spelled-out way, and that against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.layers import logits as logits_module
from megalite.layers.cross_entropy import Head, HeadSpec
from megalite.layers.documents import Targets
from megalite.layers.logits import Columns, KernelColumns, OwnColumns, SpelledOutColumns
from megalite.layers.swiglu import swiglu_gradient
from megalite.parallel.axes import SINGLE
from tests.kit.triton_stand_in import triton_on_a_cpu

LABELS = torch.tensor([0, -1, 3, 2, -100, 4, 10**9])
"""Of columns that are here, and elsewhere on both sides."""

WIDTHS = {"few columns": (5, 5), "rows that are apart": (101, 108), "more than one program's": (5000, 5000)}
"""Columns, and numbers from one row to the next."""

BF16_STEP = 2.0**-7
"""From a number to its neighbour, to which the other way may round."""


def numbers(width: int, stride: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of seven tokens, scales and weights."""
    generator = torch.Generator().manual_seed(width)
    logits = 3 * torch.randn(7, stride, generator=generator)
    logits[4] += 500.0
    scale, weights = torch.rand(2, 7, generator=generator)
    return logits.to(dtype)[:, :width], scale, weights


def through(columns: Columns, scale: Tensor, weights: Tensor) -> OwnColumns:
    """Measured, and turned into the gradient."""
    own = columns.measure()
    columns.put_gradient(scale, weights)
    return own


@pytest.mark.parametrize("soft_cap", [None, 1.5, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", WIDTHS.values(), ids=WIDTHS)
def test_kernels_compute_what_is_spelled_out(shape, dtype, soft_cap):
    """In fp32 inside, whatever the format of the logits; and what lies between rows stays."""
    logits, scale, weights = numbers(*shape, dtype)
    between = logits.as_strided((7, shape[1] - shape[0]), logits.stride(), shape[0]) if shape[1] > shape[0] else None
    stays = None if between is None else between.clone()
    plain = logits.clone()
    wanted = through(SpelledOutColumns(plain, LABELS, soft_cap), scale, weights)
    with triton_on_a_cpu():
        found = through(KernelColumns(logits, LABELS, soft_cap), scale, weights)
    cap = soft_cap or 1.0
    assert torch.equal(found.here, wanted.here)
    assert torch.allclose(found.maximum, wanted.maximum, rtol=0, atol=2e-7 * cap)
    assert torch.allclose(found.total, wanted.total, rtol=4e-7 * cap)
    assert torch.allclose(found.target[found.here], wanted.target[found.here], rtol=1e-6, atol=4e-7 * cap)
    tolerance = BF16_STEP if dtype == torch.bfloat16 else 4e-7 * cap
    assert torch.allclose(logits.float(), plain.float(), rtol=tolerance, atol=4e-7 * cap)
    if between is not None:
        assert torch.equal(between, stays)


@pytest.mark.parametrize("soft_cap", [1e3, 1e7])
def test_a_wide_bound_keeps_the_logits(soft_cap):
    """Hardly bounded, they are hardly changed, though their share of the bound is tiny."""
    logits, scale, weights = numbers(101, 101, torch.float32)
    logits[4] -= 500.0
    plain = logits.clone()
    wanted = through(SpelledOutColumns(plain, LABELS, None), scale, weights)
    with triton_on_a_cpu():
        found = through(KernelColumns(logits, LABELS, soft_cap), scale, weights)
    assert torch.allclose(found.maximum, wanted.maximum, rtol=100 / soft_cap**2 + 1e-6)
    assert torch.allclose(logits, plain, rtol=2e-4, atol=1e-6)


def test_weights_may_be_one_number_for_all():
    """Or labels every second of a tensor's: what is not end to end is made so."""
    logits, scale, weights = numbers(101, 101, torch.float32)
    plain, same = logits.clone(), weights[:1].expand(7)
    labels = torch.stack((LABELS, LABELS + 1), dim=1)[:, 0]
    through(SpelledOutColumns(plain, labels, None), scale, same)
    with triton_on_a_cpu():
        through(KernelColumns(logits, labels, None), scale, same)
    assert torch.allclose(logits, plain, rtol=1e-6, atol=4e-7)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_the_gradient_is_that_of_the_loss(soft_cap):
    """With scales of a softmax over these columns alone it is autograd's, in float64."""
    logits, _, weights = numbers(101, 101, torch.float64)
    labels = LABELS.clamp(0, 100)
    leaf = logits.clone().requires_grad_()
    bounded = leaf if soft_cap is None else soft_cap * torch.tanh(leaf / soft_cap)
    losses = torch.nn.functional.cross_entropy(bounded, labels, reduction="none")
    (wanted,) = torch.autograd.grad((losses * weights).sum(), leaf)
    columns = SpelledOutColumns(logits, labels, soft_cap)
    own = columns.measure()
    columns.put_gradient(weights / own.total, weights)
    assert torch.allclose(own.total.log() - own.target, losses, rtol=1e-12)
    assert torch.allclose(logits, wanted, rtol=1e-9, atol=1e-12)


def test_no_rows_are_launched_as_none():
    """A rank may have no tokens."""
    none = torch.empty(0, 5), torch.empty(0, dtype=torch.int64), None
    with triton_on_a_cpu():
        own = through(KernelColumns(*none), torch.empty(0), torch.empty(0))
    assert own.total.shape == own.here.shape == (0,)


def test_what_is_not_finite_shows():
    """In the sums, so that the loss is no number either."""
    logits = torch.zeros(2, 5)
    logits[0, 3], logits[1, 1] = float("nan"), float("inf")
    with triton_on_a_cpu():
        own = KernelColumns(logits, torch.zeros(2, dtype=torch.int64), None).measure()
    assert torch.isnan(own.total).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_of_swiglu(dtype):
    """Its gradient, of more columns than one program takes."""
    generator = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(3, width, generator=generator).to(dtype) for width in (1500, 3000))
    with triton_on_a_cpu() as kernels:
        found = kernels.launch_swiglu_gradient(grad, x)
    tolerance = BF16_STEP if dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(found.float(), swiglu_gradient(grad, x).float(), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("spec", [HeadSpec(13), HeadSpec(13, 0.03, 1.5)], ids=["plain", "bounded, z-loss"])
def test_a_head_computes_the_same_by_kernels(monkeypatch, spec):
    """Loss and both gradients, over chunks of tokens, where they are taken."""
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(101, 12, generator=generator), torch.randn(40, 12, generator=generator)
    targets = Targets(torch.randint(101, (40,), generator=generator), torch.rand(40, generator=generator))
    found = []
    for by_kernels in (False, True):
        monkeypatch.setattr(logits_module, "takes_own_kernels", lambda x, answer=by_kernels: answer)
        head = Head(101, 12, tp=SINGLE, spec=spec)
        head.weight.data.copy_(F.pad(weight, (0, 0, 0, len(head.weight) - 101)))
        leaf = hidden.clone().requires_grad_()
        with triton_on_a_cpu():
            loss = head(leaf, targets)
        loss.backward()
        found.append((loss.detach(), leaf.grad, head.weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
