"""The section `train`: how long, from where and how the loop runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from megalite.config.brought import COMPONENTS, LOSSES, wrong_choices, wrong_options
from megalite.config.sections.evaluation import EarlyStoppingConfig, TaskConfig
from megalite.section import FrozenOptions, Options, Problem, Section


class LossConfig(Section):
    """A loss that a plug-in brings, in place of the cross-entropy."""

    name: Annotated[str, AfterValidator(LOSSES.known)]
    """Name of a loss that a plug-in brings."""
    options: Options = Field(default_factory=FrozenOptions)
    """What it may be told."""

    def problems(self) -> Iterator[Problem]:
        yield from wrong_options(LOSSES[self.name], self.options, f"loss {self.name}")

    def function(self) -> Callable[..., Any]:
        """The plug-in's, with its options."""
        return LOSSES[self.name].bound(self.options)


class PreferenceConfig(Section):
    """Learning from pairs of answers, of which the first is preferred (DPO, Rafailov et al. 2023). The reference is the
    model that the run begins with (train.init_from)."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Of a pair's margin: DPO's own, SLiC's, or IPO's, whose log-probabilities are means over tokens."""
    beta: PositiveFloat = 0.1
    """How closely the model is held to the reference: larger is closer."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """sigmoid: share of pairs whose order is taken to be wrong (conservative DPO)."""
    chosen_nll: NonNegativeFloat = 0.0
    """Coefficient of the mean cross-entropy of chosen answers beside the loss (0.2 in Llama 3), which keeps their
    likelihood from falling."""

    def problems(self) -> Iterator[Problem]:
        if self.label_smoothing and self.loss != "sigmoid":
            yield ("label_smoothing",), f"only loss=sigmoid has it; use 0 with loss={self.loss}"


RecomputeMode = Literal["none", "selective", "full"]


class RecomputeRule(Section):
    """Some blocks, and what they make again: one of `blocks`, `every` and `first` says which."""

    mode: RecomputeMode = "full"
    """What they make again: nothing, what lies inside the MLP and norms, or all."""
    blocks: tuple[NonNegativeInt, ...] = ()
    """By their numbers from 0, whatever the layout; blocks that predict further ahead count on."""
    every: PositiveInt | None = None
    """Each so-manieth block of the model from the first on: 2 for 0, 2, 4."""
    first: PositiveInt | None = None
    """So many of each pipeline stage, from its first on: its blocks that keep their activations longest."""


class TrainConfig(Section):
    """How long, from where and how the loop runs."""

    steps: PositiveInt | None = None
    """Number of optimizer steps. Give one of steps, tokens and epochs."""
    tokens: PositiveInt | None = None
    """Number of training tokens, rounded up to whole steps."""
    epochs: PositiveFloat | None = None
    """Passes over the one source of data.train, rounded up to whole steps, which they become when the run begins.
    Passes over single sources of a mixture are data.mix.epochs."""
    init_from: Path | None = None
    """Weights to start from: a checkpoint folder or a Hugging Face folder. Step count and optimizer start anew.
    A run folder with checkpoints of its own is always resumed instead."""
    verify_init_from: bool = True
    """Before the first step of a run that starts from a Hugging Face folder, compare what transformers computes with it
    and what megalite does, and refuse to train when they differ. Takes a second process on the CPU and memory for
    the weights in fp32 (or for the first blocks of them)."""
    branch_from: Path | None = None
    """A checkpoint to go on from in a run folder of its own, with its optimizer, step and place in the data: a decay
    off a stable phase, another rate from there on, or another optimizer, which then begins anew. Steps count on, so
    `steps` must be above the checkpoint's. The model, the data and the batch must be its run's."""
    eval_every: PositiveInt | None = None
    """Steps between validations (there is one at the end too when data.valid or tasks are given); null for only that
    one."""
    eval_batches: PositiveInt = 16
    """Global batches in one validation of each set."""
    watch: str | None = None
    """The validation set whose loss decides which checkpoint is best and when to stop early; null takes the mean over
    the tokens of all sets."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run when the watched loss no longer falls; null to train to the last step."""
    tasks: tuple[TaskConfig, ...] = ()
    """Multiple-choice questions that are answered at every validation."""
    preference: PreferenceConfig | None = None
    """Learn from pairs of answers (docs/finetune.md); null for tokens by themselves."""
    loss: LossConfig | None = None
    """What training minimises and `loss` in metrics.jsonl is; null for the cross-entropy, which every validation
    measures in any case."""
    components: Options = Field(default_factory=FrozenOptions)
    """Components that plug-ins bring, by name, each with its options, as in `{coverage: {every: 10}}`; called in this
    order, after those of megalite."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for the blocks; auto turns it on when the run is long enough to repay the compilation."""
    cuda_graphs: bool = False
    """Record the kernels of a micro-batch once, and have the GPU start them by itself from then on: for models so small
    that the host cannot start kernels as fast as they end. With one stage, ZeRO 0 or 1, and bf16 or fp16."""
    recompute: RecomputeMode = "none"
    """Activations recomputed in the backward pass: none, those inside the MLP and norms, or whole blocks. Compiled
    blocks redo under `none` what `selective` does, since it costs them nothing."""
    recompute_layers: tuple[RecomputeRule, ...] = ()
    """Blocks that make something else again than `recompute` says, as in [{mode: full, every: 2}]; of several rules for
    a block the last one holds. Numbers alone, as in [0, 1], stand for [{mode: full, blocks: [0, 1]}]."""
    mlp_chunk_tokens: PositiveInt | None = None
    """Tokens of a rank that an MLP works on at a time, for sequences whose MLPs do not fit: what lies inside them is
    redone in the backward pass, as many products again as the MLP's forward pass has; null for all at once."""
    offload_activations: bool = False
    """With recompute=full: what blocks keep, their input, waits for the backward pass in the host's memory, and is
    copied there and back while others compute."""
    flash_attention: Literal["torch", "fa3", "fa4"] = "torch"
    """Whose flash attention a GPU takes for packed documents: torch's own, or that of an installed flash-attn-3 or
    flash-attn-4, for Hopper and newer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes CUDA when it is there."""

    @field_validator("recompute_layers", mode="before")
    @classmethod
    def _take_numbers(cls, given: Any) -> Any:
        has_numbers = isinstance(given, list | tuple) and given and all(type(each) is int for each in given)
        return [{"blocks": given}] if has_numbers else given

    def problems(self) -> Iterator[Problem]:
        yield from wrong_choices(COMPONENTS, self.components, "components")
