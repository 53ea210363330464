"""NVFP4 against compressed-tensors, which writes the format that others serve."""

from __future__ import annotations

import pytest
import torch

from megalite.layers.fp4.numbers import NVFP4
from tests.layers.fp4.kit import draw


def test_nvfp4_numbers_agree():
    """To the last bit: with an outlier, with blocks of zeros, at the sizes of weights."""
    theirs = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    settings = theirs.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    for x in (draw(8, 96), draw(40, 64, seed=1) * 1e-3):
        whole = theirs.utils.generate_gparam(x.amin().reshape(1), x.amax().reshape(1))
        blocks = x.unflatten(1, (-1, 16))
        scale, zero = theirs.utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), settings, global_scale=whole)
        wanted = forward.fake_quantize(x, scale, zero, settings, global_scale=whole)
        assert torch.equal(NVFP4.quantise(x, tile=(1, 16)), wanted)
