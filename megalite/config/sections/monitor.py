"""The section `monitor`: what a run shows of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from megalite.config.brought import METRICS, wrong_choices
from megalite.config.sections.profile import ProfileConfig
from megalite.section import FrozenOptions, Options, Problem, Section


class WandbConfig(Section):
    """A run on Weights & Biases; needs `pip install 'megalite[wandb]'`."""

    project: str = "megalite"
    """Where it is listed."""
    mode: Literal["offline", "online"] = "offline"
    """Offline writes below the run's folder, for `wandb sync` later; compute nodes often have no network."""
    name: str | None = None
    """Null takes that of the run's folder."""
    id: str | None = None
    """Of a run to go on with after a restart; null begins another one at every start."""


class MonitorConfig(Section):
    """What a run shows of itself. metrics.jsonl always gets every step."""

    log_every: PositiveInt = 10
    """Steps between lines in the log when the output is not a terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""
    wandb: WandbConfig | None = None
    """Send the same curves to Weights & Biases; null does not."""
    layers_every: PositiveInt | None = 100
    """Steps between measurements of the layers, which go to layers.jsonl: norms of gradients, weights and updates,
    sizes of the stream, attention's entropy and logits, dead units. One costs about a third of a step; null for
    none."""
    attention_queries: PositiveInt | None = 512
    """Queries of a sequence whose attention `layers_every` looks at. Of a longer sequence they are a random sample, and
    layers.jsonl says what share of all; null looks at all, which costs as the square of the length."""
    machine: str | None = None
    """A machine of `megalite plan`, by its name or its file, to hold the first steps against what is planned for it;
    null takes that of the GPU's name, if there is one."""
    profile: ProfileConfig | None = None
    """Trace some steps with a profiler; null does not."""
    metrics: Options = Field(default_factory=FrozenOptions)
    """Metrics that plug-ins bring, by name, each with its options; a number more in every line of metrics.jsonl."""

    def problems(self) -> Iterator[Problem]:
        yield from wrong_choices(METRICS, self.metrics, "metrics")
