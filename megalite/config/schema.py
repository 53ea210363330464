"""Every setting a run has: one frozen pydantic model a section, a docstring under every field.

A section is a module of `config.sections`; it holds what the user chose and checks each value by itself. What follows
from several values together lives in `config.validate`, what is derived from them in `config.plan`. No default depends
on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError, model_validator

from megalite.config.explain import explain
from megalite.config.sections.batch import BatchConfig, LengthStageConfig, NoiseScaleConfig, RampConfig
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.config.sections.data import DataConfig, MixConfig, MixStageConfig, SourceConfig
from megalite.config.sections.engine import DEEPSPEED_OWNED_KEYS, EngineConfig
from megalite.config.sections.evaluation import EarlyStoppingConfig, SlopeConfig, TaskConfig
from megalite.config.sections.health import HealthConfig
from megalite.config.sections.model import ModelConfig, MupConfig, RopeConfig, RopeScaling
from megalite.config.sections.monitor import MonitorConfig
from megalite.config.sections.optimizer import OptimizerConfig, WeightGroupConfig
from megalite.config.sections.parallel import ParallelConfig
from megalite.config.sections.precision import Fp4Config, Fp8Config, PrecisionConfig, QatConfig
from megalite.config.sections.profile import ProfileConfig
from megalite.config.sections.run import RunConfig
from megalite.config.sections.schedule import PlateauConfig, ScheduleConfig
from megalite.config.sections.slurm import SlurmConfig
from megalite.config.sections.train import TrainConfig
from megalite.errors import ConfigError
from megalite.plugins import Plugins, load_plugins
from megalite.section import Section

__all__ = [
    "DEEPSPEED_OWNED_KEYS",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EarlyStoppingConfig",
    "EngineConfig",
    "Fp4Config",
    "Fp8Config",
    "HealthConfig",
    "LengthStageConfig",
    "MixConfig",
    "MixStageConfig",
    "ModelConfig",
    "MonitorConfig",
    "MupConfig",
    "NoiseScaleConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlateauConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "QatConfig",
    "RampConfig",
    "RopeConfig",
    "RopeScaling",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "SlopeConfig",
    "SlurmConfig",
    "SourceConfig",
    "TaskConfig",
    "TrainConfig",
]


ADAPTED = WeightGroupConfig(match=("*",), but=("*.lora_?",), frozen=True)
"""All that low-rank adapters leave as it is."""


class _Told(type(Section)):  # type: ignore[misc]  # pydantic's own metaclass, which has no public name
    """The type of a class whose wrong values are told as those of a file are."""

    def __call__(cls, *arguments: Any, **values: Any) -> Any:
        try:
            return super().__call__(*arguments, **values)
        except ValidationError as error:
            problems = explain(error, cls)
            raise ConfigError(": ".join(filter(None, [".".join(keys), each])) for keys, each in problems) from error


class Config(Section, metaclass=_Told):
    """A whole run; made by hand, `Config(train={"steps": 9})`, it raises a ConfigError where it is wrong, as
    `load_config` does, and loads its plug-ins."""

    plugins: Plugins = ()
    """Modules or files that bring what other settings name; docs/extending.md says how they are made."""
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

    @model_validator(mode="after")
    def _freeze_what_is_adapted(self) -> Config:
        """With adapters (`model.lora`) alone trained, unless a group that the user gave has a weight."""
        others = tuple(group for group in self.optimizer.groups if group != ADAPTED)
        groups = others if self.model.lora is None else (*others, ADAPTED)
        if groups != self.optimizer.groups:
            object.__setattr__(self, "optimizer", self.optimizer.model_copy(update={"groups": groups}))
        return self

    @model_validator(mode="before")
    @classmethod
    def _load_plugins(cls, values: Any) -> Any:
        """They bring what other settings may name."""
        names = values.get("plugins", ()) if isinstance(values, Mapping) else ()
        is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        load_plugins(names if is_list else ())  # anything else has its own complaint
        return values
