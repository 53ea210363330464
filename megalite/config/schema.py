"""Every setting a run has: one frozen pydantic model a section, a docstring under every field.

A section is a module of `config.sections`; it holds what the user chose and checks each value by itself. What follows
from several values together lives in `config.validate`, what is derived from them in `config.plan`. No default depends
on the machine.
"""

from __future__ import annotations

from megalite.config.sections.batch import BatchConfig, NoiseScaleConfig, RampConfig
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.config.sections.data import DataConfig, MixConfig, MixStageConfig, SourceConfig
from megalite.config.sections.engine import DEEPSPEED_OWNED_KEYS, EngineConfig
from megalite.config.sections.evaluation import EarlyStoppingConfig, TaskConfig
from megalite.config.sections.health import HealthConfig
from megalite.config.sections.model import ModelConfig, MupConfig, RopeConfig, RopeScaling
from megalite.config.sections.monitor import MonitorConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.config.sections.parallel import ParallelConfig
from megalite.config.sections.precision import Fp8Config, PrecisionConfig
from megalite.config.sections.run import RunConfig
from megalite.config.sections.schedule import PlateauConfig, ScheduleConfig
from megalite.config.sections.slurm import SlurmConfig
from megalite.config.sections.train import TrainConfig
from megalite.plugins import Plugins
from megalite.section import Section

__all__ = [
    "DEEPSPEED_OWNED_KEYS",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EarlyStoppingConfig",
    "EngineConfig",
    "Fp8Config",
    "HealthConfig",
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
    "RampConfig",
    "RopeConfig",
    "RopeScaling",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "SlurmConfig",
    "SourceConfig",
    "TaskConfig",
    "TrainConfig",
]


class Config(Section):
    """A whole run."""

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
