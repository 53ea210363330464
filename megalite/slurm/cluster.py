"""The cluster profile: what a job has to know of the machines it runs on, written once a cluster.

`configs/clusters/` has examples, and `megalite launch --cluster auto` fills one in from what Slurm says of itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from megalite.config.load import build
from megalite.config.yaml_source import dump_yaml, read_source
from megalite.section import Section
from megalite.slurm_quoting import check_options, check_printable, export_line

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)

SHELL_LINES = ("setup", "command")
"""Settings that are shell, as the user writes it: they go into scripts as they are."""

OWNED_BY_EVALUATION = {
    **dict.fromkeys(("--job-name", "-J", "--output", "-o", "--dependency", "-d", "--array", "-a", "--wrap"), ""),
    **dict.fromkeys(("--parsable", "--wait", "-W"), ""),
    **dict.fromkeys(("--time", "-t"), "set time_limit"),
}
"""Options of sbatch that cannot be given for evaluations, because they are set here; and what sets them."""

OWNED = {
    **OWNED_BY_EVALUATION,
    **dict.fromkeys(("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node"), "the layout says how many"),
    **dict.fromkeys(("--partition", "-p"), "set partition"),
    **dict.fromkeys(("--account", "-A"), "set account"),
    **dict.fromkeys(("--qos", "-q"), "set qos"),
    **dict.fromkeys(("--constraint", "-C"), "set constraint"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "set cpus_per_rank"),
    "--gpus-per-node": "set gpus_per_node",
    "--signal": "set save_seconds",
    **dict.fromkeys(("--chdir", "-D", "--error", "-e", "--open-mode", "--no-kill", "-k", "--requeue"), ""),
    **dict.fromkeys(("--no-requeue", "--kill-on-invalid-dep"), ""),
}
"""The same for the jobs of a run."""


def _in_one_line(value: Any, info: ValidationInfo) -> Any:
    """Refuse control characters in every text of a section, but for shell lines."""
    for text in _texts(value) if info.field_name not in SHELL_LINES else ():
        check_printable(text)
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for item in value.items() for text in item)
    elif isinstance(value, Sequence):
        yield from (text for each in value for text in _texts(each))


class ContainerConfig(Section):
    """The container that ranks run in."""

    runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """`apptainer` runs each rank as `apptainer exec`; `pyxis` hands the image to srun (enroot)."""
    image: str
    """Path or address of the image. megalite must be installed in it."""
    mounts: tuple[str, ...] = ()
    """Folders to show inside, as in /scratch or /data:/data."""

    _in_one_line = field_validator("*")(_in_one_line)

    @field_validator("mounts")
    @classmethod
    def _commas_part_mounts(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for mount in mounts:
            if "," in mount:
                raise ValueError(f"{mount!r}: a comma parts mounts; give each as an entry of its own")
        return mounts


class EvaluationConfig(Section):
    """A job for every new checkpoint, beside the training."""

    command: str
    """Shell line; {checkpoint} is the checkpoint's folder, {step} its step, {run} the run's folder."""
    every_steps: PositiveInt = 1
    """Checkpoints at multiples of so many steps are evaluated; `checkpoint.keep_every` keeps them until then."""
    gpus: NonNegativeInt = 0
    """GPUs of the job."""
    time_limit: str = "1:00:00"
    """--time of the job."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch."""

    _in_one_line = field_validator("*")(_in_one_line)

    @field_validator("time_limit")
    @classmethod
    def _time_is_slurms(cls, text: str) -> str:
        seconds_of(text)
        return text

    @field_validator("sbatch")
    @classmethod
    def _options_are_free(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        check_options(options, OWNED_BY_EVALUATION)
        return options

    @field_validator("command")
    @classmethod
    def _names_are_known(cls, text: str) -> str:
        try:
            text.format(checkpoint="", step="", run="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"{text!r}: {error}; use {{checkpoint}}, {{step}} and {{run}}, and write {{{{ for {{"
            ) from None
        return text


class ClusterConfig(Section):
    """A cluster's nodes, and how jobs are submitted to it."""

    name: str = "cluster"
    """For people."""
    partition: str | None = None
    """--partition of sbatch; null for the cluster's default."""
    account: str | None = None
    """--account of sbatch."""
    qos: str | None = None
    """--qos of sbatch."""
    constraint: str | None = None
    """--constraint of sbatch: features that nodes must have."""
    gpus_per_node: NonNegativeInt = 8
    """GPUs of a node; 0 for nodes without."""
    ranks_per_node: PositiveInt | None = None
    """Ranks on a node; null is one a GPU, or one on a node without GPUs."""
    cpus_per_rank: PositiveInt | None = None
    """Cores of a rank, its data loading included; null for one, or for its share of all with `--exclusive`."""
    network_interface: str | None = None
    """Interface that ranks talk through, for gloo and NCCL's bootstrap; null finds the one to other nodes."""
    time_limit: str = "24:00:00"
    """--time of a job: minutes, h:m:s or d-h:m:s. A run goes on over as many jobs as it takes."""
    save_seconds: PositiveInt = Field(120, le=65535)
    """How long before the time limit the run is asked to save and stop: two steps and a save should fit."""
    spares: NonNegativeInt = 0
    """Further nodes in the allocation, one of which steps in for a node that fails; a job begins without them where
    there are none. 5 % of many nodes is usual."""
    max_jobs: PositiveInt = 100
    """Jobs that a run may take one after the other."""
    tp_across_nodes: bool = False
    """Allow tensor-parallel groups that span nodes: their collectives are then as slow as the network."""
    setup: tuple[str, ...] = ()
    """Shell lines before the ranks start on each node: `module load cuda/12.8`, `source .venv/bin/activate`."""
    environment: dict[str, str] = {}  # noqa: RUF012  (pydantic copies it)
    """Variables of the ranks, as in NCCL_IB_HCA: mlx5."""
    container: ContainerConfig | None = None
    """Run the ranks in a container."""
    evaluation: EvaluationConfig | None = None
    """Evaluate every new checkpoint in a job of its own."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, as in ["--exclusive", "--mem=0"]."""

    _in_one_line = field_validator("*")(_in_one_line)

    @field_validator("time_limit")
    @classmethod
    def _time_is_slurms(cls, text: str) -> str:
        seconds_of(text)
        return text

    @field_validator("environment")
    @classmethod
    def _variables_have_names(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            export_line(name, value)
        return environment

    @field_validator("sbatch")
    @classmethod
    def _options_are_free(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        check_options(options, OWNED)
        return options

    @property
    def num_ranks_per_node(self) -> int:
        """Ranks that a full node runs."""
        return self.ranks_per_node or self.gpus_per_node or 1


def load_cluster(path: Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """Read a cluster profile.

    Raises:
        ConfigError: everything that is wrong with it, with `file:line`.
    """
    source = read_source(path, "a cluster's profile is a mapping of its settings, such as `partition: gpu`")
    for assignment in overrides:
        source.override(assignment)
    return build(ClusterConfig, source)


def dump_cluster(cluster: ClusterConfig) -> str:
    """The profile as YAML, all defaults filled in."""
    return dump_yaml(cluster.model_dump(mode="json"))


def seconds_of(limit: str) -> int:
    """A time limit as Slurm writes it, in seconds.

        90  90:30  12:00:00  7-0  7-12:30  7-12:30:15        minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s

    Raises:
        ValueError: it is none of these.
    """
    match = _TIME.fullmatch(limit)
    if match is None:
        raise ValueError(f"{limit!r} is no time limit; write minutes, h:m:s or d-h:m:s, as in 12:00:00")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
