"""Fifty updates of each optimizer are those of a reference implementation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.optim.averaging import Averaging, put_average
from megalite.optim.optimizers import build_optimizer
from megalite.optim.slices import Slice
from megalite.parallel.axes import SINGLE
from tests.kit.slices import whole_slices
from tests.model.stages import GPT_STYLE, make_stage, tiny_model

STEPS, LR, DECAY = 50, 1e-2, 0.1

ROUNDING = 2e-6
"""fp32, absolute, on weights near 1: 50 updates of 1e-2, each rounded in another order."""

BF16_ROUNDING = 5e-4
"""Muon's products are rounded to bf16 in both; a sum in another order may round the last bit the other way."""

Weights = dict[str, Tensor]
Step = Callable[[int], None]


def gradients(weights: Weights, step: int) -> Weights:
    """Gradients that depend on the weights and on the step: a valley with noise."""
    generator = torch.Generator().manual_seed(step)
    return {name: 0.3 * w + torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def trained(product_dtype: torch.dtype = torch.float32, seen: list[Weights] | None = None, **settings: Any) -> Weights:
    """A stage's canonical weights after all steps; `seen` gets the gradients of each."""
    return canonical(slices_of_trained(product_dtype, seen, **settings))


def slices_of_trained(
    product_dtype: torch.dtype = torch.float32,
    seen: list[Weights] | None = None,
    rate: Callable[[int], float] = lambda step: LR,
    **settings: Any,
) -> list[Slice]:
    """The same with what an optimizer keeps; `rate` is that of each step."""
    stage = make_stage(tiny_model(**GPT_STYLE), dtype=torch.float32)
    optimizer = build_optimizer(stage, OptimizerConfig(lr=LR, weight_decay=DECAY, **settings), product_dtype)
    parameters = list(stage.parameters())
    optimizer.bind(whole_slices(stage), parameters, SINGLE, SINGLE, 0)
    named = dict(stage.named_parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for step in range(1, STEPS + 1):
        found = gradients(canonical(optimizer.slices), step)
        if seen is not None:
            seen.append(found)
        for part in optimizer.slices:
            parameter = named[part.local.parameter_name]
            part.local.view(parameter.grad).copy_(found[part.local.weight.name])
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
    return optimizer.slices


def canonical(slices: list[Slice], kind: str = "weight") -> Weights:
    return {part.local.weight.name: part.tensors[kind].view(part.local.rectangle.shape).clone() for part in slices}


def start() -> Weights:
    """The same weights as parameters of their own, each canonical one by itself."""
    stage = make_stage(tiny_model(**GPT_STYLE), dtype=torch.float32)
    whole = {part.local.weight.name: part for part in whole_slices(stage)}
    return {
        name: torch.nn.Parameter(part.tensors["weight"].view(part.local.rectangle.shape).clone())
        for name, part in whole.items()
    }


def groups(weights: Weights) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which do not."""
    return [
        {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": DECAY},
        {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
    ]


def run_reference(weights: Weights, *optimizers: torch.optim.Optimizer) -> Weights:
    with torch.no_grad():
        for step in range(1, STEPS + 1):
            for name, gradient in gradients(weights, step).items():
                weights[name].grad = gradient
            for optimizer in optimizers:
                optimizer.step()
    return weights


def assert_close(found: Weights, expected: Weights, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    off = {name: float((weight - expected[name]).detach().abs().max()) for name, weight in found.items()}
    assert max(off.values()) <= tolerance, off


def test_adamw():
    """torch's AdamW."""
    weights = start()
    run_reference(weights, torch.optim.AdamW(groups(weights), lr=LR, betas=(0.9, 0.95), eps=1e-8))
    assert_close(trained(name="adamw"), weights, ROUNDING)


class DecoupledSgd(torch.optim.SGD):
    """torch's SGD, whose own decay goes through the momentum, with decoupled decay."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.mul_(1.0 - group["lr"] * group["decoupled"])
        super().step()


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd(nesterov):
    """torch's SGD with momentum."""
    weights = start()
    apart = [{"params": group["params"], "decoupled": group["weight_decay"]} for group in groups(weights)]
    run_reference(weights, DecoupledSgd(apart, lr=LR, momentum=0.9, nesterov=nesterov))
    assert_close(trained(name="sgd", momentum=0.9, nesterov=nesterov), weights, 10 * ROUNDING)  # steps of 10 lr


def test_lion():
    """Algorithm 2 of Chen et al. 2023, written out."""
    weights = {name: weight.detach() for name, weight in start().items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(1, STEPS + 1):
        for name, gradient in gradients(weights, step).items():
            decay = DECAY if weights[name].dim() > 1 else 0.0
            update = (0.9 * momenta[name] + 0.1 * gradient).sign()
            weights[name] = weights[name] - LR * (update + decay * weights[name])
            momenta[name] = 0.99 * momenta[name] + 0.01 * gradient
    assert_close(trained(name="lion", betas=(0.9, 0.99)), weights, ROUNDING)


def warmed_up(step: int) -> float:
    """Ten steps up, forty at the peak."""
    return LR * min(1.0, step / 10)


def test_schedule_free_adamw():
    """Algorithm 1 of Defazio et al. 2024 with x, y and z written out, each z weighed by its rate squared; the average
    that is read of the state is x."""
    x = {name: weight.detach() for name, weight in start().items()}
    z, y, squares = dict(x), dict(x), {name: torch.zeros_like(weight) for name, weight in x.items()}
    total = 0.0
    for step in range(1, STEPS + 1):
        rate = warmed_up(step)
        total += rate**2
        share = rate**2 / total
        for name, gradient in gradients(y, step).items():
            decay = DECAY if x[name].dim() > 1 else 0.0
            squares[name] = 0.95 * squares[name] + 0.05 * gradient**2
            direction = gradient / ((squares[name] / (1 - 0.95**step)).sqrt() + 1e-8)
            z[name] = z[name] - rate * (direction + decay * y[name])
            x[name] = (1 - share) * x[name] + share * z[name]
            y[name] = 0.1 * z[name] + 0.9 * x[name]
    found = slices_of_trained(rate=warmed_up, name="schedule_free_adamw", betas=(0.9, 0.95))
    assert_close(canonical(found), y, ROUNDING)
    assert_close(canonical(found, "z_minus_x"), {name: z[name] - x[name] for name in x}, ROUNDING)
    for part in found:
        put_average(part, 0.9)
    assert_close(canonical(found), x, ROUNDING)
    assert max(float((x[name] - y[name]).abs().max()) for name in x) > 1000 * ROUNDING


def test_averages_by_schedule():
    """A group with a schedule of its own has shares of its own, and one that gets it late goes on from the run's; a
    state goes on as if nothing had been."""
    rates, own, averaging = [0.1, 0.2, 0.2, 0.1, 0.2], [0.3, 0.1, 0.0, 0.6, 0.3], Averaging()
    largest, others = [0.1, 0.2, 0.2, 0.2, 0.2], [0.3, 0.3, 0.3, 0.6, 0.6]
    for step in range(5):
        averaging.advance(rates[step], {2: own[step]})
        for group, top in ((None, largest), (7, largest), (2, others)):
            expected = top[step] ** 2 / sum(each**2 for each in top[: step + 1])
            assert averaging.share(group) == pytest.approx(expected, rel=1e-12)
        again = Averaging()
        again.load(json.loads(json.dumps(averaging.state())))
        averaging = again
    averaging.advance(0.2, {2: 0.1, 5: 0.4})
    total = sum(each**2 for each in largest) + 0.4**2
    assert averaging.share(5) == pytest.approx(0.4**2 / total, rel=1e-12)
    averaging.load({})
    averaging.advance(0.0, {})
    assert averaging.share(None) == 0.0  # of a first step without a rate nothing counts
    averaging.advance(0.1, {})
    assert averaging.share(None) == 1.0


def test_adafactor():
    """transformers' Adafactor without relative steps."""
    weights = start()
    options = {"scale_parameter": False, "relative_step": False, "warmup_init": False, "decay_rate": -0.8}
    run_reference(weights, transformers.Adafactor(groups(weights), lr=LR, **options))
    assert_close(trained(name="adafactor"), weights, ROUNDING)


def slow_soap(weight: Tensor, name: str, every: int, longest: int, step_gradients: list[Weights]) -> Tensor:
    """A matrix after all steps of SOAP in fp64, by the paper's algorithm 3, but for the choice of first bases."""
    rows, columns = weight.shape
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    left, right = torch.eye(rows, dtype=torch.float64), torch.eye(columns, dtype=torch.float64)
    covariances = {"left": torch.zeros_like(left), "right": torch.zeros_like(right)}

    def eigenvectors(covariance: Tensor, basis: Tensor) -> Tensor:
        if len(basis) > longest:
            return basis
        damped = covariance + 1e-2 * covariance.trace() / len(basis) * torch.eye(len(basis), dtype=torch.float64)
        return torch.linalg.qr(damped @ basis).Q

    for step, found in enumerate(step_gradients, 1):
        g = found[name].double()
        weight = weight * (1 - LR * DECAY)
        if step > 1:
            mean = 0.9 * mean + 0.1 * g
            square = 0.95 * square + 0.05 * (left.T @ g @ right) ** 2
            root = (square / (1 - 0.95 ** (step - 1))).sqrt() + 1e-8
            weight = weight - LR * left @ ((left.T @ mean @ right) / (1 - 0.9 ** (step - 1)) / root) @ right.T
        covariances["left"] = 0.95 * covariances["left"] + 0.05 * g @ g.T
        covariances["right"] = 0.95 * covariances["right"] + 0.05 * g.T @ g
        for _ in range(10 if step == 1 else int(step % every == 0)):
            left, right = eigenvectors(covariances["left"], left), eigenvectors(covariances["right"], right)
    return weight


SOAP_ROUNDING = 1e-4
"""fp32 against fp64: bases of eigenvalues that lie close turn by more than their matrices were rounded by."""


@pytest.mark.parametrize(("every", "longest"), [(3, 1000), (7, 40), (7, 1)])
def test_soap(every, longest):
    """The paper's algorithm, both sides turned, one alone, or none, which is AdamW a step late; the rest is AdamW's."""
    seen: list[Weights] = []
    found = trained(name="soap", precondition_every=every, max_precondition_dim=longest, seen=seen)
    adamw = start()
    run_reference(adamw, torch.optim.AdamW(groups(adamw), lr=LR, betas=(0.9, 0.95), eps=1e-8))
    expected = {
        name: slow_soap(w.detach().double(), name, every, longest, seen).float()
        if name.startswith("blocks.") and w.dim() == 2
        else adamw[name]
        for name, w in start().items()
    }
    assert_close(found, expected, SOAP_ROUNDING)


def test_muon():
    """torch's Muon on the matrices of the blocks, query, key and value each for itself, and its AdamW on the rest."""
    weights = start()
    inner = [w for name, w in weights.items() if name.startswith("blocks.") and w.dim() == 2]
    tables = [w for name, w in weights.items() if not name.startswith("blocks.") and w.dim() == 2]
    vectors = [w for w in weights.values() if w.dim() == 1]
    muon = torch.optim.Muon(inner, lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    rest = [{"params": tables, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    run_reference(weights, muon, torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), eps=1e-8))
    assert_close(trained(torch.bfloat16, name="muon"), weights, BF16_ROUNDING)


def dynamic_table(signed: bool) -> Tensor:
    """The 8-bit table of Dettmers et al. 2022, written down anew: seven decades, each with twice as many entries."""
    magnitudes = []
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        magnitudes += [(0.1 + 0.9 * (i + 0.5) / count) * 10.0 ** (decade - 6) for i in range(count)]
    positive = torch.tensor([*magnitudes[:-1], 1.0] if signed else [*magnitudes, 1.0], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([-positive.flip(0), zero, positive]) if signed else torch.cat([zero, positive])


def rounded(numbers: Tensor, table: Tensor) -> Tensor:
    """Each number of each block of 256 as the nearest entry times the block's largest magnitude: by trying them all."""
    flat, result = numbers.reshape(-1), []
    for block in flat.split(256):
        scale = block.abs().max()
        nearest = (block.unsqueeze(1) - table * scale).abs().argmin(dim=1)
        if table[0] == 0:
            nearest = torch.where(block > 0, nearest.clamp(min=1), nearest)
        result.append(table[nearest] * scale)
    return torch.cat(result).view(numbers.shape)


def slow_adamw8bit(weights: Weights) -> Iterator[None]:
    """AdamW in fp64 that rounds its moments after each step."""
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    tables = dynamic_table(True), dynamic_table(False)
    for step in range(1, STEPS + 1):
        for name, gradient in gradients({name: w.float() for name, w in weights.items()}, step).items():
            weight, (mean, root), g = weights[name], moments[name], gradient.double()
            mean, square = 0.9 * mean + 0.1 * g, 0.95 * root**2 + 0.05 * g**2
            decay = DECAY if weight.dim() > 1 else 0.0
            update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
            weights[name] = weight * (1 - LR * decay) - LR * update
            moments[name] = mean, square.sqrt()
            if weight.dim() > 1:
                moments[name] = rounded(mean, tables[0]), rounded(square.sqrt(), tables[1])
        yield


def test_a_step_is_torchs():
    """Given a closure, an optimizer calls it with autograd on, updates, and returns its result."""
    stage = make_stage(tiny_model(**GPT_STYLE), dtype=torch.float32)
    optimizer = build_optimizer(stage, OptimizerConfig(lr=LR, name="sgd"))
    optimizer.bind(whole_slices(stage), list(stage.parameters()), SINGLE, SINGLE, 0)
    before = [parameter.detach().clone() for parameter in stage.parameters()]

    def closure() -> float:
        total = sum(parameter.square().sum() for parameter in stage.parameters())
        total.backward()
        return total.item()

    expected = sum(parameter.square().sum().item() for parameter in before)
    assert optimizer.step(closure) == pytest.approx(expected)
    assert optimizer.num_updates == 1
    assert all(not torch.equal(a, b) for a, b in zip(before, stage.parameters(), strict=True) if a.any())


FLIPS = 0.02
"""Share of weights that may differ: a number on the border of two codes falls to one side in fp32, to the other in
fp64. Codes are about 1e-2 apart and fp32 is wrong by 1e-6, so of 100 roundings a weight one in a hundred does."""

ONE_CODE = 2e-3
"""How far such a weight may be off: a few updates of 1e-2 that differ by a code."""


def test_adamw8bit():
    """AdamW in fp64 with moments rounded by trying all 256 codes."""
    weights = {name: weight.detach().double() for name, weight in start().items()}
    for _ in slow_adamw8bit(weights):
        pass
    found = trained(name="adamw8bit")
    off = torch.cat([(found[name] - weights[name]).abs().view(-1) for name in found])
    assert (off > 10 * ROUNDING).sum() <= FLIPS * off.numel()
    assert off.max() < ONE_CODE


class RoundedMuon(torch.optim.Muon):
    """torch's Muon, whose momentum is rounded to the nearest of all codes after each step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            momentum = state["momentum_buffer"]
            momentum.copy_(rounded(momentum.double(), dynamic_table(True)))


def test_muon8bit():
    """torch's Muon with a rounded momentum; norms and biases by AdamW. A number at the border of two codes may fall to
    the other side, and then all of its matrix moves a little."""
    weights = start()
    inner = [w for name, w in weights.items() if name.startswith("blocks.") and w.dim() == 2]
    vectors = [w for w in weights.values() if w.dim() == 1]
    muon = RoundedMuon(inner, lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    run_reference(weights, muon, torch.optim.AdamW(vectors, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0))
    found, plain = (trained(torch.bfloat16, name=name) for name in ("muon8bit", "muon"))
    for name, weight in weights.items():
        if weight.dim() == 1:
            torch.testing.assert_close(found[name], weight.detach(), rtol=0.0, atol=ROUNDING)
        elif name.startswith("blocks."):
            off, apart = ((each[name] - weight).detach().abs() for each in (found, plain))
            assert off.max() < ONE_CODE, name
            assert off.mean() < 0.3 * apart.mean(), name  # 8 bits are seen, and are the right ones


def test_lion8bit():
    """Lion as above, with a momentum that is rounded to the nearest of all codes after each step."""
    weights = {name: weight.detach() for name, weight in start().items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(1, STEPS + 1):
        for name, gradient in gradients(weights, step).items():
            is_matrix = weights[name].dim() > 1
            update = (0.9 * momenta[name] + 0.1 * gradient).sign()
            weights[name] = weights[name] - LR * (update + (DECAY if is_matrix else 0.0) * weights[name])
            kept = 0.99 * momenta[name] + 0.01 * gradient
            momenta[name] = rounded(kept.double(), dynamic_table(True)).float() if is_matrix else kept
    assert_close(trained(name="lion8bit", betas=(0.9, 0.99)), weights, ROUNDING)
