"""Every setting a run has: one frozen pydantic model a section, a docstring under every field.

The schema holds what the user chose and checks each value by itself. What follows from several values together lives
in `config.validate`, what is derived from them in `config.plan`. No default depends on the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.presets import PRESETS, with_preset
from megalite.config.section import Section
from megalite.errors import did_you_mean

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]

DEEPSPEED_OWNED_KEYS = {
    "train_batch_size": "set batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "set batch.micro_batch_size",
    "gradient_accumulation_steps": "it follows from the sizes in batch and from dp",
    "gradient_clipping": "set optimizer.clip_grad_norm",
    "zero_optimization": "set parallel.zero_stage",
    "zero_allow_untested_optimizer": "leave it out",
    "bf16": "set precision.dtype",
    "fp16": "set precision.dtype",
    "data_types": "set precision.dtype",
    "pipeline": "set parallel.pp",
    "optimizer": "use the section optimizer",
    "scheduler": "use the section schedule",
    "steps_per_print": "set monitor.log_every",
    "activation_checkpointing": "set train.recompute",
}
"""Keys of DeepSpeed's JSON that megalite generates, and what to do instead of setting them."""


class RunConfig(Section):
    """Where a run lives and what makes it reproducible."""

    dir: Path = Path("runs/default")
    """Run folder: config, metrics, events, checkpoints and the report go there. One folder is one run."""
    seed: NonNegativeInt = 1234
    """Seed of the weights, of the data order and of dropout."""
    deterministic: bool = True
    """Ask torch for deterministic kernels, so that a resumed run is bit-equal. Turn off when a GPU kernel has no
    deterministic form or to gain a little speed."""


class RopeScaling(Section):
    """Stretching of the rotary frequencies to longer sequences than the base frequencies suit."""

    type: Literal["linear", "llama3"]
    """`linear` divides every frequency by `factor` (Chen et al. 2023); `llama3` only the low ones (Llama 3.1)."""
    factor: PositiveFloat = 8.0
    """How many times longer the sequences become."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_max_positions / low_freq_factor are divided by `factor`."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_max_positions / high_freq_factor are left alone."""
    original_max_positions: PositiveInt = 8192
    """llama3: sequence length in tokens of the training before the stretch."""


class RopeConfig(Section):
    """Rotary position embedding (Su et al. 2021), in the half-split form of GPT-NeoX and Llama in Hugging Face."""

    theta: PositiveFloat = 10000.0
    """Base of the frequencies. Raise it (500000) for long sequences."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Part of each head that is rotated; 0.25 is GPT-NeoX's choice."""
    scaling: RopeScaling | None = None
    """Stretch to longer sequences; null for none."""


class ModelConfig(Section):
    """A decoder-only transformer. Start from a preset and override what differs."""

    preset: str | None = None
    """Name of a preset (`megalite config presets` lists them); keys given beside it win over the preset's."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_layers: PositiveInt = 4
    """Number of transformer blocks."""
    num_heads: PositiveInt = 4
    """Number of query heads; tp must divide it."""
    num_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); null means num_heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; null means hidden_size / num_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Width inside the MLP; null means 4 x hidden_size for gelu and 8/3 x hidden_size, rounded up to 64, for swiglu."""
    vocab_size: PositiveInt | None = None
    """True vocabulary size in tokens; null takes the tokenizer's. Padding for tp is derived and never exported."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """MLP form: gated SiLU (Shazeer 2020), or plain GELU, exact or by tanh (GPT-2)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the MLP and at the end. LayerNorm always has a bias."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions, or a learned table of max_positions rows (GPT-2)."""
    rope: RopeConfig = RopeConfig()
    """Rotary settings; ignored only when positions is `learned`, in which case they must be left at their defaults."""
    max_positions: PositiveInt | None = None
    """Longest sequence the model is meant for, in tokens; null means batch.seq_len. Sizes the learned table."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotation (Qwen3)."""
    bias: Literal["none", "qkv", "all"] = "none"
    """Which linear layers have a bias: none (Llama), query, key and value (Qwen2), or all (GPT-2)."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head."""
    sliding_window: PositiveInt | None = None
    """Attend to this many tokens back, the token itself included (Mistral); null for the whole document."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout after the embedding and on each residual branch. The mask is a function of seed, token and channel, so
    it is the same in every layout."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    init_depth_scaling: bool = True
    """Divide the deviation of the two projections that write to the residual stream by sqrt(2 x num_layers) (GPT-2)."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        return with_preset(given) if isinstance(given, dict) else given

    @field_validator("preset")
    @classmethod
    def _know_preset(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(f"there is no preset {preset!r}{did_you_mean(preset, PRESETS)}; use one of {known}")
        return preset


class ParallelConfig(Section):
    """How the ranks share the work: world size = pp x dp x cp x tp."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks: each matrix is cut into this many. Keep within a node."""
    pp: PositiveInt = 1
    """Pipeline stages: the list of layers is cut into this many."""
    blocks_per_stage: tuple[NonNegativeInt, ...] | None = None
    """Transformer blocks of each stage, as in [9, 9, 8, 6]; null balances the stages, counting the head that the last
    one has too."""
    dp: PositiveInt | None = None
    """Data-parallel ranks; null derives it from the world size, which is pp x tp when `megalite train` starts the
    ranks itself."""
    cp: PositiveInt = 1
    """Context-parallel ranks. Only 1 is built so far; anything else is refused."""
    sequence_parallel: bool = False
    """Between the tensor-parallel parts, cut the stream of tokens over tp too (Korthikanti et al. 2022): less memory,
    the same traffic."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: what is cut over dp. 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""


class BatchConfig(Section):
    """Sizes of a step's batch."""

    micro_batch_size: PositiveInt = 1
    """Sequences a rank sends through the model at once."""
    global_batch_size: PositiveInt = 8
    """Sequences in one optimizer step, over all ranks and accumulation steps."""
    seq_len: PositiveInt = 512
    """Tokens in a sequence."""


class SourceConfig(Section):
    """One set of tokenized documents."""

    path: Path
    """A folder made by `megalite data pack` or `megalite data tokenize`, or the prefix of a Megatron `.bin/.idx`
    pair. What is not packed is concatenated and cut on the fly."""
    weight: PositiveFloat = 1.0
    """Share of the samples that come from here, relative to the other sources."""
    name: str | None = None
    """Name in metrics and messages; null takes the last part of the path."""


class MixStageConfig(Section):
    """A stretch of the run with weights of its own. All stages but the last say where they end, in one of two ways."""

    until_tokens: PositiveInt | None = None
    """Tokens of the run at which this stage ends."""
    share: float | None = Field(None, gt=0.0, lt=1.0)
    """Part of the run that this stage takes."""
    weights: dict[str, float] | None = None
    """Share of each source, by name; those left out are not read in this stage. Null takes those of `data.train`."""


class MixConfig(Section):
    """What decides the sources' shares, beside their weights. `megalite data mix-plan CONFIG` shows the outcome."""

    temperature: PositiveFloat | None = None
    """T in p ~ weight x tokens^(1/T): 1 follows the sizes, more evens them out; null takes the weights as shares."""
    epochs: dict[str, PositiveFloat] = {}  # noqa: RUF012  (pydantic copies it)
    """Passes over a source in the whole run, by name; the others share what is left by their weights."""
    stages: tuple[MixStageConfig, ...] = ()
    """The run in parts (a curriculum, or annealing on good data at the end); empty for one."""
    ranks: dict[str, Path] = {}  # noqa: RUF012
    """Files made by `megalite data rank`, by source: its samples come in rising order of their score in each epoch."""
    rank_stretches: PositiveInt = 100
    """Parts of such an order that are shuffled within themselves."""


class DataConfig(Section):
    """What the model reads."""

    train: tuple[SourceConfig, ...] = ()
    """Sources of the training mixture."""
    valid: tuple[SourceConfig, ...] = ()
    """Sources of the validation loss, read from their start in a fixed order; weights are ignored."""
    mix: MixConfig = MixConfig()
    """What decides the shares of the sources beside their weights: sizes, epochs, stages."""
    tokenizer: Path | None = None
    """Folder made by `megalite data train-tokenizer`: sets the vocabulary and travels into the export. Null takes the
    one recorded by the data."""
    document_masks: bool = True
    """Packed documents do not see each other, positions restart in each, and no label crosses a border."""
    prefetch: PositiveInt = 4
    """Micro-batches that the loader's thread reads ahead, at least; small ones are read together."""


class Fp8Config(Section):
    """FP8 matrix products."""

    backend: Literal["te", "emulate"]
    """`te` uses Transformer Engine on a GPU; `emulate` rounds to FP8 on any device, to study a recipe."""
    recipe: Literal["delayed", "current", "block"] = "current"
    """Where scales come from: the history of maxima, the tensor at hand, or its blocks."""


class PrecisionConfig(Section):
    """Number formats."""

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Format of weights and activations in the forward and backward pass. Master weights and optimizer state are
    always fp32. fp32 is the fast one on CPUs without bf16 units."""
    fp8: Fp8Config | None = None
    """FP8 for the linear layers inside the blocks; null for none."""


class OptimizerConfig(Section):
    """The weight update."""

    name: Literal["adamw"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019), torch's fused implementation."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of matrices. Norms and biases are never decayed."""
    decay_embeddings: bool = True
    """Whether the embedding tables and the head are decayed too."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Scale the gradient down to this global L2 norm; null for no clipping."""


class ScheduleConfig(Section):
    """The learning rate of each step. The first update is step 1."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after warmup; wsd holds the peak and decays at the end (Hu et al. 2024)."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warmup: step s uses lr x s / warmup_steps."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate of the last step (cosine, linear and wsd)."""
    decay_steps: PositiveInt | None = None
    """wsd: length of the final decay; null means a tenth of the run."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """wsd: form of the decay; sqrt is 1 - sqrt(x) (Hägele et al. 2024)."""


class TrainConfig(Section):
    """How long, from where and how the loop runs."""

    steps: PositiveInt | None = None
    """Number of optimizer steps. Give this or tokens."""
    tokens: PositiveInt | None = None
    """Number of training tokens, rounded up to whole steps. Give this or steps."""
    init_from: Path | None = None
    """Weights to start from: a checkpoint folder or a Hugging Face folder. Step count and optimizer start anew.
    A run folder with checkpoints of its own is always resumed instead."""
    eval_every: PositiveInt | None = None
    """Steps between validations (there is one at the end too when data.valid is given); null for only that one."""
    eval_batches: PositiveInt = 16
    """Global batches in one validation."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for the blocks; auto turns it on when the run is long enough to repay the compilation."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none, those inside the MLP and norms, or whole blocks. Compiled
    blocks redo under `none` what `selective` does, since it costs them nothing."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes CUDA when it is there."""


class MonitorConfig(Section):
    """What a run shows of itself. metrics.jsonl always gets every step."""

    log_every: PositiveInt = 10
    """Steps between lines in the log when the output is not a terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""


class HealthConfig(Section):
    """What to do when training goes wrong."""

    stop_on_nonfinite: bool = True
    """Stop with an error, before the weights are touched, when the loss is NaN or infinite on any rank."""


class SlurmConfig(Section):
    """How `megalite launch` watches over a run. What belongs to the cluster is in its profile (`configs/clusters/`)."""

    beat_seconds: PositiveFloat = 30.0
    """A rank without a heartbeat for so long is frozen, or its node is: the attempt is ended, and another started."""
    start_seconds: PositiveFloat = 1800.0
    """Longest way from the start to the first step: imports, compilation, reading a large checkpoint."""
    step_seconds: PositiveFloat = 600.0
    """Longest stay of all ranks in one phase of a step; raise it when a step, a validation or a save takes longer."""
    max_failures: PositiveInt = 3
    """Failures in a row without a new checkpoint after which the chain of jobs ends and says why."""
    check_nodes: bool = True
    """Measure every node before an attempt, and leave out those that are broken or slow."""


class EngineConfig(Section):
    """A door to DeepSpeed for what megalite does not set itself."""

    deepspeed_extra: dict[str, Any] = {}  # noqa: RUF012
    """Keys merged into DeepSpeed's JSON. Keys that megalite generates are refused."""

    @field_validator("deepspeed_extra")
    @classmethod
    def _refuse_owned_keys(cls, extra: dict[str, Any]) -> dict[str, Any]:
        owned = [key for key in extra if key in DEEPSPEED_OWNED_KEYS]
        if owned:
            instead = "; ".join(f"{key}: {DEEPSPEED_OWNED_KEYS[key]}" for key in owned)
            raise ValueError(f"megalite generates {', '.join(owned)}, so it cannot be set here ({instead})")
        return extra


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig()
    data: DataConfig = DataConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    health: HealthConfig = HealthConfig()
    slurm: SlurmConfig = SlurmConfig()
    engine: EngineConfig = EngineConfig()
