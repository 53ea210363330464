"""The settings of a model that mean the same whether it is filled or not."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megalite.architecture.activations import ACTIVATIONS
from megalite.architecture.attentions import ATTENTIONS
from megalite.architecture.norms import NORMS
from megalite.section import Section

MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000
MOST_PREDICTIONS = 16

SMALLEST_NUMBER = 2.0**-126
"""The smallest number above 0 that fp32 has; what is smaller may be 0 where a model divides by it."""


class Fp32Section(Section):
    """A group of settings that layers or the optimizer compute with, in fp32: what that may have as 0 is refused."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_tiny_numbers(cls, value: Any) -> Any:
        numbers = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(each, float) and 0 < abs(each) < SMALLEST_NUMBER for each in numbers):
            raise PydanticCustomError("too_small", "fp32 may have 0 for numbers nearer to 0 than 2^-126")
        return value


class RopeScaling(Fp32Section):
    """Stretching of the rotary frequencies to longer sequences than the base frequencies suit."""

    type: Literal["linear", "llama3", "yarn", "longrope"]
    """`linear` divides every frequency by `factor` (Chen et al. 2023); `llama3` only the low ones (Llama 3.1); `yarn`
    the low ones by a ramp, and makes attention sharper (Peng et al. 2023); `longrope` divides each by a factor of its
    own, and by others in documents that are longer than the original length (Ding et al. 2024)."""
    factor: PositiveFloat = 8.0
    """How many times longer the sequences become."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_max_positions / low_freq_factor are divided by `factor`."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_max_positions / high_freq_factor are left alone."""
    original_max_positions: PositiveInt = 8192
    """llama3, yarn, longrope: sequence length in tokens of the training before the stretch."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies that turn more often than this within the original length are left alone."""
    beta_slow: PositiveFloat = 1.0
    """yarn: those that turn less often are divided by `factor`."""
    truncate: bool = True
    """yarn: the ramp between them begins and ends at whole channels."""
    attention_factor: PositiveFloat | None = None
    """yarn, longrope: what rotated queries and keys are multiplied with. null is 0.1 ln(factor) + 1 for yarn, and
    sqrt(1 + ln(factor) / ln(original_max_positions)) for longrope."""
    short_factor: tuple[PositiveFloat, ...] = ()
    """longrope: divisors of the frequencies in documents up to the original length, one for each rotated pair."""
    long_factor: tuple[PositiveFloat, ...] = ()
    """longrope: those in longer documents."""

    @property
    def sharpness(self) -> float:
        """`attention_factor` with null filled in (Peng et al. 2023, equation 22; Ding et al. 2024)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.type == "yarn" and self.factor > 1.0:
            return 0.1 * math.log(self.factor) + 1.0
        if self.type == "longrope" and self.factor > 1.0:
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_positions))
        return 1.0


class RopeConfig(Fp32Section):
    """Rotary position embedding (Su et al. 2021), by default in the half-split form of GPT-NeoX and Llama in Hugging
    Face."""

    theta: PositiveFloat = 10000.0
    """Base of the frequencies. Raise it (500000) for long sequences."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Part of each head that is rotated; 0.25 is GPT-NeoX's choice."""
    interleaved: bool = False
    """Neighbouring channels are a pair, as in the paper and in DeepSeek, not channel i of either half. Another order of
    the same numbers, which weights are trained in."""
    scaling: RopeScaling | None = None
    """Stretch to longer sequences; null for none."""


class MlaConfig(Fp32Section):
    """Multi-head latent attention (DeepSeek-V2, 2024): a token's keys and values are made of few numbers, its latent,
    and of a key that all heads share, which alone is rotated. `model.head_dim` is the sum of the two `qk_` widths."""

    q_lora_rank: PositiveInt | None = None
    """Width of a latent that queries are made of (DeepSeek-V3: 1536); null makes them of the stream."""
    kv_lora_rank: PositiveInt = 512
    """Width of the latent that keys and values are made of."""
    qk_nope_head_dim: PositiveInt = 128
    """Channels of a query and key head that are not rotated."""
    qk_rope_head_dim: PositiveInt = 64
    """Those that are; the keys' are the same for all heads."""
    v_head_dim: PositiveInt = 128
    """Channels of a value head."""

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class MtpConfig(Fp32Section):
    """Multi-token prediction (DeepSeek-V3, 2024): layers behind the last one, each of which predicts a token further
    ahead. They are trained beside the model, and dropped or used to draft tokens when it serves."""

    num_layers: PositiveInt = Field(1, le=MOST_PREDICTIONS)
    """Tokens predicted ahead of the next one; each takes a block like the model's last, and two norms and a matrix."""
    loss_weight: NonNegativeFloat = 0.3
    """Of the mean of their losses beside the model's own, which alone is reported as the loss."""
    loss_weight_steps: tuple[tuple[PositiveInt, NonNegativeFloat], ...] = ()
    """From a step on another weight: [[100000, 0.1]] (DeepSeek-V3: 0.3, and 0.1 from two thirds of the run on)."""

    def weight_at(self, step: int) -> float:
        """The weight in a step, counted from 1."""
        return next((weight for first, weight in reversed(self.loss_weight_steps) if first <= step), self.loss_weight)


class MupConfig(Fp32Section):
    """Maximal update parametrization (Yang et al. 2022): rates tuned on a narrow model hold on a wide one.

    The width multiplier m is hidden_size / base_hidden_size. Matrices inside the blocks start narrower by sqrt(m) and
    learn at lr / m (adamw, lion) or lr / sqrt(m) (muon), with state of 8 bits too; logits are divided by m; attention
    divides by head_dim instead of its root. At m = 1 nothing changes.
    """

    base_hidden_size: PositiveInt = 256
    """hidden_size of the model that the settings were tuned on."""
    base_ffn_hidden_size: PositiveInt | None = None
    """Its ffn_hidden_size; null takes the same ratio to hidden_size as here."""
    base_head_dim: PositiveInt | None = None
    """Its head_dim; null takes the same as here, the number of heads growing with the width."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor on the embedding; tuned on the base model and kept."""
    output_multiplier: PositiveFloat = 1.0
    """Factor on the logits, beside 1 / m; tuned on the base model and kept."""


class InitConfig(Fp32Section):
    """How fresh weights are drawn (`architecture.initial`): by `init_std`, or by the width of each matrix.

    Fans are those of the unfused matrix, so that weights are equal in every layout. `init_depth_scaling` holds for each
    rule. Rules other than `normal` are for matrices of the blocks and the head; tables keep `init_std`.
    """

    rule: Literal["normal", "fan_in", "xavier_normal", "xavier_uniform", "he_normal", "he_uniform"] = "normal"
    """`normal` has the deviation init_std; `fan_in` 1 / sqrt(inputs); `xavier_*` sqrt(2 / (inputs + outputs)) (Glorot
    and Bengio 2010); `he_*` sqrt(2 / inputs) (He et al. 2015, Kaiming); `*_uniform` as wide, drawn evenly."""
    gain: PositiveFloat | None = None
    """Factor on the deviation in place of the rule's own, which is 1, and sqrt(2) for `he_*`."""
    cut: float | None = Field(None, ge=0.5, le=6.0)
    """Truncated normal: numbers further from 0 than so many deviations are drawn again, in tables and the head too (2
    to 3 are usual); null for none."""
    cut_keeps_std: bool = True
    """What is drawn has the deviation that is asked for: the normal distribution behind it is wider, 1.14 times with a
    cut of 2 and 1.014 times with 3, and the cut with it. false: as torch.nn.init.trunc_normal_, where the cut makes
    deviations smaller."""
    embedding_std: PositiveFloat | None = None
    """Deviation of the tables of tokens and of positions; null for init_std."""
    head_std: PositiveFloat | None = None
    """Deviation of the output layer; null for the rule's."""

    @property
    def is_uniform(self) -> bool:
        """Whether the rule draws evenly."""
        return self.rule.endswith("_uniform")


class MoeConfig(Fp32Section):
    """Mixture of experts (Shazeer et al. 2017): in sparse blocks a router sends each token to few of many MLPs."""

    num_experts: PositiveInt = Field(8, le=MOST_EXPERTS)
    """MLPs of a sparse block."""
    top_k: PositiveInt = 2
    """Of these, how many a token goes to."""
    ffn_hidden_size: PositiveInt | None = None
    """Width inside an expert; null takes model.ffn_hidden_size."""
    shared_ffn_hidden_size: NonNegativeInt = 0
    """Width of an MLP beside them that every token goes through (DeepSeekMoE, Dai et al. 2024); 0 for none."""
    shared_gate: bool = False
    """What the shared MLP puts out is multiplied by a sigmoid of the token (Qwen2-MoE)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router makes of its logits. With `normalize`, softmax over all experts gives the chosen ones the weights
    that a softmax over these alone would."""
    normalize: bool = True
    """The weights of a token's experts add up to 1."""
    scale: PositiveFloat = 1.0
    """Factor on these weights (DeepSeek-V3: 2.5)."""
    logit_bias: bool = False
    """The router's logits have a bias that is learnt (gpt-oss)."""
    num_groups: PositiveInt = 1
    """Experts are in so many groups, of which a token goes to `top_groups` at most (DeepSeek-V2)."""
    top_groups: PositiveInt = 1
    """Groups that a token's experts are chosen from; num_groups for all."""
    group_score: Literal["max", "sum_of_two"] = "max"
    """By what groups are chosen: the best score in each (DeepSeek-V2), or the sum of the best two (DeepSeek-V3)."""
    bias_rate: NonNegativeFloat | None = None
    """Balance without a loss (Wang et al. 2024): each expert has a bias on its score that counts in the choice alone,
    and falls or rises by so much a step where the expert had more or less than its share (DeepSeek-V3: 0.001). null for
    no such bias, 0 for one that stays."""
    aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the balancing loss N x sum of f_i P_i over the N experts, f being the share of the tokens' choices
    that an expert got, and P its mean score (Switch, Fedus et al. 2021: 0.01). Training alone minimises it: the loss in
    metrics stays the cross-entropy."""
    aux_loss_over: Literal["sequence", "micro_batch", "global_batch"] = "global_batch"
    """Tokens whose choices f counts: each sequence by itself (DeepSeek-V3), each micro-batch (Switch), or the global
    batch (Qiu et al. 2025), for which those of the last step are taken."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the squared log of the sum that the router's softmax divides by (ST-MoE, Zoph et al. 2022: 0.001),
    trained beside the loss likewise."""
    capacity_factor: PositiveFloat | None = None
    """In training an expert takes at most so many times its even share of a sequence's choices, those of the largest
    weights, and the rest is dropped (GShard, Lepikhin et al. 2020: 2); null drops nothing, as evaluation and exports
    do."""
    first_dense: NonNegativeInt = 0
    """The first blocks, which have one MLP of model.ffn_hidden_size (DeepSeek-V3: 3)."""
    every: PositiveInt = 1
    """Of the others each so-manieth is sparse, the last of each such run: 2 for each second (Llama 4)."""


LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]

LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


class LoraConfig(Fp32Section):
    """Low-rank adaptation (LoRA, Hu et al. 2021): `y = x W' + scale (x A') B'`, where W stays as it is and A and B are
    trained. All other weights are frozen, unless an entry of `optimizer.groups` has them."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """scale is alpha / rank."""
    targets: tuple[LoraTarget, ...] | None = None
    """The linear layers that have one: q, k, v and o of attention; gate, up and down of MLPs that are not experts.
    null: all that the model has of these."""
    rank_stabilized: bool = False
    """scale is alpha / sqrt(rank), so that rates stay as the rank grows (rsLoRA, Kalajdzievski 2023)."""

    @property
    def found_targets(self) -> tuple[LoraTarget, ...]:
        """The targets, null spelled out."""
        return LORA_TARGETS if self.targets is None else self.targets

    @property
    def scale(self) -> float:
        """Factor on what A and B put out."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


def largest_integer(bits: int) -> int:
    """Of integers around zero with so many bits; the smallest is its negative."""
    return 2 ** (bits - 1) - 1


class WeightScales(Fp32Section):
    """Which weights are rounded to integers times scales that are trained, and how; `precision.qat` with
    `learned_scales`, as a model has it."""

    bits: Literal[4, 8]
    """Of an integer."""
    group_size: PositiveInt | None
    """Numbers along the input dim that share a scale; None for a whole row."""
    first_block: NonNegativeInt
    """The first block with such weights."""
    last_block: NonNegativeInt
    """The last one."""

    @property
    def largest(self) -> int:
        """See `largest_integer`."""
        return largest_integer(self.bits)


class ModelSettings(Fp32Section):
    """What a config may say of a model, and what a filled one has."""

    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_layers: PositiveInt = Field(4, le=MOST_LAYERS)
    """Number of transformer blocks."""
    num_heads: PositiveInt = 4
    """Number of query heads; tp must divide it."""
    activation: Annotated[str, AfterValidator(ACTIVATIONS.known)] = "swiglu"
    """Of the MLP. With a gate: `swiglu` (SiLU), `swiglu_clamped` (gpt-oss), `geglu`, `geglu_tanh` (Gemma), `reglu`;
    without: `gelu`, `gelu_tanh` (GPT-2), `silu`, `relu`, `relu2`; or one that a plug-in brings."""
    norm: Annotated[str, AfterValidator(NORMS.known)] = "rmsnorm"
    """Normalisation of the stream: `rmsnorm`, `layernorm` (which has a bias), or `zero_centered_rmsnorm`, whose weights
    are what 1 is added to (Gemma); or one that a plug-in brings."""
    norm_placement: Literal["before", "after", "both", "post"] = "before"
    """Where a block normalises: what goes into attention and MLP (pre-norm), what comes out, before it is added to the
    stream (OLMo 2), both (Gemma 2; sandwich or peri-norm), or the stream after each addition (post-norm, the original
    Transformer; the final norm before the head stays)."""
    parallel_residual: bool = False
    """Attention and MLP read the same stream and are added to it together (GPT-NeoX, Pythia)."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions, or a learned table of max_positions rows (GPT-2)."""
    rope: RopeConfig = RopeConfig()
    """Rotary settings; ignored only when positions is `learned`, in which case they must be left at their defaults."""
    qk_norm: bool | Literal["whole"] = False
    """RMSNorm of queries and keys before the rotation: of each head (Qwen3), or, `whole`, over all heads (OLMo 2)."""
    mla: MlaConfig | None = None
    """Multi-head latent attention; null for heads that are made of the stream."""
    attention: Annotated[str, AfterValidator(ATTENTIONS.known)] = "softmax"
    """How queries, keys and values are mixed: `softmax`, or a way that a plug-in brings."""
    attention_scale: PositiveFloat | None = None
    """What products of queries and keys are multiplied with; null is 1 / sqrt(head_dim)."""
    attention_sinks: bool = False
    """Each head has a score of its own, learnt, that softmax counts beside those of the keys: a query may look at
    nothing (gpt-oss)."""
    attention_soft_cap: PositiveFloat | None = None
    """Bound c of those products, as c tanh(x / c) (Gemma 2); null for none."""
    logit_soft_cap: PositiveFloat | None = None
    """The same of the logits."""
    embedding_scale: PositiveFloat = 1.0
    """Factor on the embedding; sqrt(hidden_size) in Gemma."""
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    """Which linear layers have a bias: none (Llama), query, key and value (Qwen2), these and attention's output, or all
    (GPT-2)."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of log(Z)^2 beside the cross-entropy of each token, Z being the sum that softmax divides by (PaLM:
    1e-4); keeps logits from drifting. Training alone minimises it: the loss in metrics stays the cross-entropy."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    sliding_window: PositiveInt | None = None
    """Attend to this many tokens back, the token itself included (Mistral); null for the whole document."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """Which blocks the window holds for, from the first on; shorter than the model it is repeated, as in
    [sliding_attention, full_attention]. null: all, where there is a window."""
    sliding_rope: RopeConfig | None = None
    """Rotary settings of the blocks with a window (Gemma 3); null for those of the others."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout after the embedding and on each residual branch. The mask is a function of seed, token and channel, so
    it is the same in every layout."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout of attention's weights, behind softmax: of each head's pairs of a query and a key. The mask is a function
    of seed, head and both tokens. No flash kernel takes it: in training scores are spelled out (docs/recipe.md says
    what that costs)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights, unless `init` has another rule for them."""
    init_depth_scaling: bool | Literal["layer"] = True
    """Divide the deviation of the two projections that write to the residual stream by sqrt(2 x num_layers) (GPT-2);
    `layer`: by sqrt(2 x (l + 1)) in block l, counted from 0; false for not at all."""
    init: InitConfig = InitConfig()
    """Other rules for the initial weights."""
    mup: MupConfig | None = None
    """Maximal update parametrization; null for the usual one."""
    moe: MoeConfig | None = None
    """Mixture of experts; null for one MLP a block."""
    mtp: MtpConfig | None = None
    """Multi-token prediction; null for the next token alone."""
    lora: LoraConfig | None = None
    """Low-rank adapters beside the linear layers; null trains the layers themselves."""

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to query, key and value have a bias."""
        return self.bias != "none"

    @property
    def has_output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.bias in ("attention", "all")

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the MLP's linear layers have biases."""
        return self.bias == "all"
