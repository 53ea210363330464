"""The section `precision`: number formats."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from megalite.section import Section

Fp8Backend = Literal["te", "scaled_mm", "emulate"]
Fp8Recipe = Literal["current", "delayed", "rowwise", "block", "mxfp8", "nvfp4"]


class Fp8Config(Section):
    """FP8 matrix products of the linear layers inside the blocks. Head, embedding, norms and attention keep `dtype`."""

    backend: Fp8Backend
    """`te` uses Transformer Engine on a GPU; `scaled_mm` torch's own FP8 products, which need no other package;
    `emulate` rounds to FP8 and multiplies in fp32 on any device, to study a recipe."""
    recipe: Fp8Recipe = "current"
    """Where scales come from: the tensor at hand (`current`), its maxima in former steps (`delayed`: scaled_mm,
    emulate), its rows (`rowwise`: scaled_mm, emulate), its blocks of 128 (`block`: te, emulate) or of 32 (`mxfp8`: te,
    emulate). `nvfp4` has 4 bits (te). mxfp8 and nvfp4 need a Blackwell GPU with te."""
    format: Literal["hybrid", "e4m3"] | None = None
    """`hybrid` gives gradients range (e5m2) in place of precision; null takes hybrid for current and delayed. The
    other recipes are e4m3 throughout."""
    amax_history_len: PositiveInt = 1024
    """delayed: steps whose maxima are remembered."""
    amax_compute: Literal["max", "most_recent"] = "max"
    """delayed: the largest of the remembered maxima, or the last one."""
    margin: NonNegativeInt = 0
    """delayed: powers of two kept free above the remembered maximum. Raise it when the watch reports saturation."""
    bf16_first_blocks: NonNegativeInt = 0
    """Blocks at the start of the model that keep `dtype`."""
    bf16_last_blocks: NonNegativeInt = 0
    """Blocks at the end of the model that keep `dtype`."""
    watch_every: PositiveInt | None = 100
    """Steps between measurements of what FP8 does to each layer (fp8.jsonl); null for none. One costs about a step."""
    fallback_error: PositiveFloat | None = Field(None, lt=1.0)
    """A layer goes back to `dtype` for good when its product in FP8, or its rounded gradient, differs by more than this
    from the unrounded one, relative and at two measurements in a row. Healthy layers are at 0.03 to 0.06. null for
    never."""

    @property
    def number_format(self) -> str:
        """The format with null replaced by the recipe's own."""
        return self.format or ("hybrid" if self.recipe in ("current", "delayed") else "e4m3")


class QatConfig(Section):
    """Quantisation-aware training: weights of the linear layers and experts inside the blocks are rounded to integers
    in the forward pass and in gradients of inputs; their own gradients pass through the rounding unchanged."""

    bits: Literal[4, 8]
    """Of a weight."""
    group_size: Literal[32, 64, 128] | None = 128
    """Numbers along the input dim that share a scale; null for a whole row."""
    symmetric: bool = True
    """Integers from -7 to 7, or -127 to 127, around zero. false has a whole zero point beside each scale, and all of 16
    or 256 integers."""
    learned_scales: bool = False
    """Train the scales with the weights (LSQ, Esser et al. 2020), which then clip what lies beyond them; false takes
    them from the largest number of each group."""
    keep_first_blocks: NonNegativeInt = 0
    """Blocks at the start of the model that are not rounded."""
    keep_last_blocks: NonNegativeInt = 0
    """Blocks at the end of the model that are not rounded."""
    start_step: PositiveInt = 1
    """The first step with rounded weights; those before it are plain ones."""


Fp4Rounding = Literal["none", "gradients", "backward"]
Fp4Transform = Literal["none", "weight_gradient", "backward"]

KEPT_SHARE = 0.15
"""Of the blocks, which NVFP4's recipe leaves in `dtype` at the end of the model."""


class Fp4Config(Section):
    """Matrix products of the linear layers inside the blocks in emulated FP4: rounded to 4-bit numbers (e2m1) and
    multiplied in fp32, on any device, to study a recipe. null in a setting takes what was published with the format."""

    format: Literal["nvfp4", "mxfp4"]
    """`nvfp4`: blocks of 16 with an e4m3 scale, and an fp32 scale a tensor (NVIDIA 2025, arXiv 2509.25149). `mxfp4`:
    blocks of 32 with a power of two (Tseng et al. 2025, arXiv 2502.20586)."""
    forward: bool | None = None
    """Round the forward product too; false rounds those of the backward pass alone. null: true for nvfp4, false for
    mxfp4."""
    stochastic_rounding: Fp4Rounding | None = None
    """What is rounded up or down by chance, so that its mean is right: `gradients` of outputs; `backward`, the
    activations and weights of the backward products too; `none`. null: gradients for nvfp4, backward for mxfp4."""
    hadamard: Fp4Transform | None = None
    """Which products get both operands by a random Hadamard transform, which spreads outliers: the `weight_gradient`;
    both products of the `backward` pass; `none`. null: weight_gradient for nvfp4, backward for mxfp4."""
    hadamard_size: Literal[16, 32, 64, 128] | None = None
    """Numbers that are transformed together. null: 16 for nvfp4, 64 for mxfp4."""
    square_weights: bool | None = None
    """A square of a weight (16 x 16, or 32 x 32) shares a scale, so that the backward pass has the numbers of the
    forward pass; false has blocks of rows, and of columns in the backward pass. null: true for nvfp4, false for
    mxfp4."""
    keep_first_blocks: NonNegativeInt = 0
    """Blocks at the start of the model that keep `dtype`."""
    keep_last_blocks: NonNegativeInt | None = None
    """Blocks at the end of the model that keep `dtype`. null: 15 % of them, rounded up, for nvfp4; 0 for mxfp4."""

    @property
    def filled(self) -> Fp4Config:
        """The settings with what was published in place of null, but for `keep_last_blocks`."""
        is_nvfp4 = self.format == "nvfp4"
        published = {
            "forward": is_nvfp4,
            "stochastic_rounding": "gradients" if is_nvfp4 else "backward",
            "hadamard": "weight_gradient" if is_nvfp4 else "backward",
            "hadamard_size": 16 if is_nvfp4 else 64,
            "square_weights": is_nvfp4,
        }
        return self.model_copy(update={name: value for name, value in published.items() if getattr(self, name) is None})

    def last_kept(self, num_layers: int) -> int:
        """Blocks at the end of a model that keep `dtype`."""
        if self.keep_last_blocks is not None:
            return self.keep_last_blocks
        return math.ceil(KEPT_SHARE * num_layers) if self.format == "nvfp4" else 0

    def rounded_blocks(self, num_layers: int) -> range:
        """Blocks of a model that multiply in FP4."""
        return range(self.keep_first_blocks, num_layers - self.last_kept(num_layers))


def _is_power_of_two(scale: float) -> float:
    if math.frexp(scale)[0] != 0.5:
        below = 2.0 ** math.floor(math.log2(scale))
        raise ValueError(f"{scale:g} is no power of two, which gradients bear exactly; use {below:g} or {2 * below:g}")
    return scale


NEVER = 10**15
"""Steps, or overflows, that no run has."""

LossScale = Annotated[PositiveFloat, AfterValidator(_is_power_of_two)]


class LossScaleConfig(Section):
    """fp16: the factor on the loss that keeps small gradients from vanishing. Steps that overflow are left out."""

    fixed: LossScale | None = None
    """The factor of all steps, such as 128; null finds it, by the other settings."""
    initial: LossScale = 2.0**16
    """Where the search begins."""
    window: PositiveInt = 1000
    """Steps without an overflow after which it is doubled."""
    hysteresis: PositiveInt = 2
    """Overflows, the last one counted, until it is halved; each further one halves it again."""
    minimum: LossScale = 1.0
    """It is never halved below this."""

    @property
    def search(self) -> LossScaleConfig:
        """The settings as those of a search: a fixed scale is one that is never left."""
        if self.fixed is None:
            return self
        return LossScaleConfig(initial=self.fixed, window=NEVER, hysteresis=NEVER, minimum=self.minimum)


RoundedTo = Literal["fp32", "tf32", "bf16"]


class PrecisionConfig(Section):
    """Number formats."""

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Format of weights and activations in the forward and backward pass. The optimizer's state does not depend
    on it. fp32 is the fast one on CPUs without bf16 units."""
    products: RoundedTo = "fp32"
    """dtype=fp32: what numbers may be rounded to on their way into a product, where the device multiplies those sooner;
    sums stay fp32. `tf32` keeps 10 bits behind the point, on GPUs since Ampere; `bf16` 7 on CPUs with AMX, and on GPUs
    tf32's. Any other device multiplies exactly."""
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the weights that updates are added to. `bf16` keeps no copy in fp32: updates are computed in fp32 and
    rounded stochastically. Saves 4 bytes a parameter with ZeRO-3 and 2 with ZeRO-2, divided by dp; needs dtype=bf16
    and one of these stages."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Format in which dp ranks add up bf16's gradients. null means fp32 with our own engines, and bf16 with DeepSpeed's
    ZeRO-2 and 3, which add up with every micro-batch and round the sum to bf16 in either case."""
    reduce_bits: Literal[4, 8] | None = None
    """Bits of a gradient on its way to the dp rank that adds it up, in blocks of 256 that share a scale (ZeRO++'s qgZ);
    sums are fp32. null sends gradients as reduce_dtype says. Native engine and FSDP2; the loss changes a little."""
    gather_bits: Literal[8] | None = None
    """Bits of a weight on its way to the dp ranks that compute with it, in such blocks (ZeRO++'s qwZ): all compute with
    the rounded ones, updates are added to the exact ones. null sends weights as they are. Native engine with ZeRO-1,
    and FSDP2."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """fp16: the factor on the loss."""
    fp8: Fp8Config | None = None
    """FP8 for the linear layers inside the blocks; null for none."""
    fp4: Fp4Config | None = None
    """Emulated FP4 for the linear layers inside the blocks; null for none."""
    qat: QatConfig | None = None
    """Rounds weights to 4 or 8 bits while training; null for none."""

    @property
    def is_emulated(self) -> bool:
        """Whether products are made in fp32 of what was rounded to fewer bits, which no device does sooner."""
        return self.fp4 is not None or (self.fp8 is not None and self.fp8.backend == "emulate")
