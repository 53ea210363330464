"""torchao's float8 in its emulated form, and its MX formats, asked by `test_torchao`."""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tensor(rows: list, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


def linear(case: dict) -> dict[str, list]:
    """Result and gradients of a Float8Linear."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    dtype = DTYPES[case["dtype"]]
    weight = tensor(case["weight"], dtype)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
    layer.weight.data.copy_(weight)
    model = torch.nn.Sequential(layer)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(case["recipe"]), emulate=True)
    convert_to_float8_training(model, config=config)
    x = tensor(case["x"], dtype).requires_grad_()
    y = model(x)
    y.backward(tensor(case["grad"], dtype))
    results = {"y": y.detach(), "dx": x.grad, "dw": model[0].weight.grad}
    return {name: result.double().tolist() for name, result in results.items()}


def mx(case: dict) -> dict[str, list]:
    """A matrix in MXFP8: its FP8 numbers, and the exponents of its scales."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    scale, data = to_mx(tensor(case["x"], torch.float32), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    exponents = scale.view(torch.uint8).int() - 127
    return {"data": data.double().tolist(), "exponents": exponents.tolist()}


def main() -> None:
    question = json.load(sys.stdin)
    answers = [{"linear": linear, "mx": mx}[case["kind"]](case) for case in question["cases"]]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
