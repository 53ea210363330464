"""Transformer Engine's own Python, and in place of its extension in C++ the few functions that a linear layer calls.

    pretend(library)          the device: `tests.stand_in.cuda`
    te = load()               before anything imports transformer_engine
    multiplied                layouts of the products so far: TN forward, NN gradient of x, NT gradient of the weight

Rounding and products are written from the published formulas, apart from ours in `megalite.layers.fp8`. Any other
function of the extension raises NotThereError when it is called, so nothing passes unseen.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)

FORMATS = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}

BLOCK = 128

ATTENTION_BACKENDS = ("NVTE_F16_arbitrary_seqlen", "NVTE_FP8", "NVTE_No_Backend")
"""Compared by name when the library is imported."""

TENSORS = {
    "FP8FwdTensors": [f"GEMM{number}_{what}" for number in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{what}{number}" for number in (1, 2, 3) for what in ("OUTPUT", "INPUT")],
}
"""Places in its lists of quantizers, from 0."""

LAYOUTS = {(True, False): "TN", (False, False): "NN", (False, True): "NT"}

multiplied: list[str] = []


class NotThereError(NotImplementedError):
    """The extension's function has no stand-in."""


def load() -> Any:
    """`transformer_engine.pytorch`, its Python as it is."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch: no shared library is looked for
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # delayed scales by its Python, not by a kernel
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    sys.meta_path.insert(0, _ByName())
    common = importlib.import_module("transformer_engine.common")
    sys.modules["transformer_engine_torch"] = _extension()
    common.load_framework_extension = lambda framework: None
    torch.cuda.get_stream_priority_range = lambda: (0, -1)
    return importlib.import_module("transformer_engine.pytorch")


class _ByName(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Its kernels in Triton and its way to ONNX are there by name; a linear layer calls none of them."""

    FAMILIES = ("transformer_engine.pytorch.triton", "transformer_engine.common.triton", "onnxscript", "onnx")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == family or name.startswith(f"{family}.") for family in self.FAMILIES):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        stub = MagicMock(name=spec.name, side_effect=NotThereError(spec.name))
        stub.__path__, stub.__name__ = [], spec.name
        return stub

    def exec_module(self, module: Any) -> None:
        pass


class _AnyMember(type):
    """A class of the extension: members of any name, none of which can be made or called."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(cls.__dict__))
        return getattr(cls, name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise NotThereError(f"transformer_engine_torch.{cls.__name__}")


def _extension() -> types.ModuleType:
    extension = types.ModuleType("transformer_engine_torch")
    parts = {
        "DType": DType,
        "quantize": quantize,
        "generic_gemm": generic_gemm,
        "NVTE_Fused_Attn_Backend": enum.IntEnum("NVTE_Fused_Attn_Backend", ATTENTION_BACKENDS),
        "get_cublasLt_version": lambda: 130000,
        "get_cudnn_version": lambda: 91200,
        "ubuf_built_with_mpi": lambda: False,
        "get_stream_priority_range": lambda *_: (0, -1),
    }
    places = {name: enum.IntEnum(name, names, start=0) for name, names in TENSORS.items()}
    vars(extension).update({**parts, **places})

    def other(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(extension, name, _AnyMember(name, (), {}))
        return getattr(extension, name)

    extension.__getattr__ = other
    return extension


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """A matrix in FP8, for each of the two sides that a product may read it from."""
    assert noop is None
    matrix = tensor.detach().reshape(-1, tensor.shape[-1]).float()
    kinds = {"Float8Quantizer": _delayed, "Float8CurrentScalingQuantizer": _current, "Float8BlockQuantizer": _block}
    make = kinds.get(type(quantizer).__name__)
    if make is None:
        raise NotThereError(f"quantize by {type(quantizer).__name__}")
    parts = make(matrix, quantizer)
    if output is not None:
        for name, part in parts.items():
            if getattr(output, name) is not None:
                getattr(output, name).copy_(part)
        return output
    return _wrapped(tensor, quantizer, parts)


def _wrapped(tensor: Tensor, quantizer: Any, parts: dict[str, Tensor]) -> Any:
    """The library's own class around the parts: what autograd may see, or a mere holder."""
    from transformer_engine.pytorch import tensor as classes
    from transformer_engine.pytorch.tensor import storage

    options = {_ARGUMENTS[name]: part if _is_wanted(name, quantizer) else None for name, part in parts.items()}
    options |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    name = "Float8Tensor"
    if "_rowwise_data" in parts:
        name = "Float8BlockwiseQTensor"
        options["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    if quantizer.internal:
        return getattr(storage, f"{name}Storage")(**options, fake_dtype=tensor.dtype)
    return getattr(classes, name)(**options, shape=tensor.shape, dtype=tensor.dtype, requires_grad=False)


_ARGUMENTS = {
    "_data": "data",
    "_transpose": "data_transpose",
    "_scale_inv": "fp8_scale_inv",
    "_rowwise_data": "rowwise_data",
    "_columnwise_data": "columnwise_data",
    "_rowwise_scale_inv": "rowwise_scale_inv",
    "_columnwise_scale_inv": "columnwise_scale_inv",
}
"""Fields by the names that the classes take them under."""


def _is_wanted(name: str, quantizer: Any) -> bool:
    if name in ("_data", "_rowwise_data", "_rowwise_scale_inv"):
        return quantizer.rowwise_usage
    return name == "_scale_inv" or quantizer.columnwise_usage


def _delayed(matrix: Tensor, quantizer: Any) -> dict[str, Tensor]:
    quantizer.amax.copy_(torch.maximum(quantizer.amax, matrix.abs().max()))
    return _by_one_scale(matrix, quantizer, quantizer.scale)


def _current(matrix: Tensor, quantizer: Any) -> dict[str, Tensor]:
    assert not quantizer.force_pow_2_scales
    amax = matrix.abs().max().clamp(min=quantizer.amax_epsilon)
    return _by_one_scale(matrix, quantizer, torch.finfo(_format(quantizer)).max / amax)


def _by_one_scale(matrix: Tensor, quantizer: Any, scale: Tensor) -> dict[str, Tensor]:
    data = _saturated(matrix * scale, _format(quantizer))
    return {"_data": data, "_transpose": data.t().contiguous(), "_scale_inv": scale.reciprocal().reshape(1)}


def _block(matrix: Tensor, quantizer: Any) -> dict[str, Tensor]:
    """Row-wise blocks lie along the rows; column-wise ones, of the transposed matrix, along what were columns."""
    parts = {}
    for side, x in (("rowwise", matrix), ("columnwise", matrix.t().contiguous())):
        rows = BLOCK if quantizer.block_scaling_dim == 2 else 1
        tiles = x.reshape(x.shape[0] // rows, rows, x.shape[1] // BLOCK, BLOCK)
        scale = torch.finfo(_format(quantizer)).max / tiles.abs().amax(dim=(1, 3)).clamp(min=2.0**-126)
        scale = torch.exp2(torch.floor(torch.log2(scale)))
        assert quantizer.force_pow_2_scales
        parts[f"_{side}_data"] = _saturated((tiles * scale[:, None, :, None]).reshape(x.shape), _format(quantizer))
        shape = quantizer.get_scale_shape(tuple(matrix.shape), columnwise=side == "columnwise")
        inverse = scale.reciprocal() if rows == BLOCK else scale.reciprocal().t()
        parts[f"_{side}_scale_inv"] = torch.nn.functional.pad(
            inverse, (0, shape[1] - inverse.shape[1], 0, shape[0] - inverse.shape[0])
        )
    return parts


def _saturated(x: Tensor, fp8: torch.dtype) -> Tensor:
    limit = torch.finfo(fp8).max
    return x.clamp(-limit, limit).to(fp8).view(torch.uint8)


def _format(holder: Any) -> torch.dtype:
    return FORMATS[DType(int(holder.dtype))]


def generic_gemm(
    left: Any, transposes_left: bool, right: Any, transposes_right: bool, out: Tensor | None, *others: Any, **_: Any
) -> tuple[Any, None, None, None]:
    """As cuBLAS has it, by columns: `right @ left^T` for TN, `right @ left` for NN, `right^T @ left` for NT."""
    _quantizer, dtype, bias, _bias_dtype, gelu, _gelu_in, _grad, _workspace, _size, accumulates, _split = others
    assert bias is None
    assert not gelu
    a, scale_a = _numbers(left, rowwise=transposes_left)
    b, scale_b = _numbers(right, rowwise=not transposes_right)
    for size in (*a.shape, *b.shape):
        assert size % 16 == 0, f"{tuple(a.shape)} x {tuple(b.shape)}: cuBLASLt wants multiples of 16"
    product = ((b.t() if transposes_right else b) @ (a.t() if transposes_left else a)) * (scale_a * scale_b)
    multiplied.append(LAYOUTS[bool(transposes_left), bool(transposes_right)])
    shape = right.size()[:-1] if not transposes_right else product.shape[:1]
    product = product.to(FORMATS[DType(int(dtype))] if dtype is not None else product.dtype).reshape(*shape, -1)
    if out is None:
        return product, None, None, None
    out.copy_(out + product if accumulates else product)
    return out, None, None, None


def _numbers(operand: Any, *, rowwise: bool) -> tuple[Tensor, Tensor | float]:
    """The numbers of an operand, from the copy that a kernel on Hopper reads, as it lies or transposed; and what its
    products are multiplied by after the sum."""
    assert not isinstance(operand, Tensor) or hasattr(operand, "_quantizer"), "a product that is not in FP8"
    fp8 = FORMATS[DType(int(operand._fp8_dtype))]
    if hasattr(operand, "_transpose"):
        data = operand._data if rowwise else operand._transpose
        wide = data.reshape(-1, data.shape[-1]).view(fp8).float()
        return (wide if rowwise else wide.t()), operand._scale_inv
    side = "rowwise" if rowwise else "columnwise"
    data, inverse = getattr(operand, f"_{side}_data"), getattr(operand, f"_{side}_scale_inv")
    data = data.reshape(-1, data.shape[-1]).view(fp8).float()
    inverse = inverse.repeat_interleave(BLOCK, dim=0) if operand._is_2D_scaled else inverse.t()
    inverse = inverse[: data.shape[0], : data.shape[1] // BLOCK].repeat_interleave(BLOCK, dim=1)
    return (data * inverse if rowwise else (data * inverse).t()), 1.0
