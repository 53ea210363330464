"""Who a rank is among all of a run, as the environment says: in torchrun's names, Slurm's or MPI's."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megalite.errors import UserError

RENDEZVOUS_VARIABLE = "MEGALITE_RENDEZVOUS"
"""Where local ranks meet, set by `train.local`; without it, MASTER_ADDR and MASTER_PORT."""
ATTEMPT_VARIABLE = "MEGALITE_ATTEMPT"
"""Which attempt of the run this is, set by a supervisor who counts them; without it, the next one."""

TOKEN_VARIABLE = "MEGALITE_TOKEN"
"""A secret of the attempt, by which its ranks know each other, set by who starts them; none is well, too."""

BEATS_VARIABLE = "MEGALITE_BEATS"
"""Folder for the heartbeats of local ranks, set by `train.local` where it watches over them."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Rank, number of ranks, local rank and number of local ranks; the last two need not be there. Of MPI: Open MPI's
names, MVAPICH's, and those of MPICH and Intel MPI."""


@dataclass(frozen=True)
class Place:
    """Who a rank is among all of a run."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str
    attempt: int | None = None
    """As a supervisor counts; None for the next."""
    token: str = ""
    """By which the ranks of an attempt know each other."""
    local_world_size: int | None = None
    """Ranks on this machine, where whoever started them says so."""

    @property
    def local_ranks(self) -> range | None:
        """The ranks on this machine; None where nobody has said how many."""
        if self.local_world_size is None:
            return None
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def given_place() -> Place | None:
    """The place that torchrun, srun, mpirun or `train.local` gave this process; None when nobody did.

    Raises:
        UserError: variables that say so make no sense.
    """
    env = os.environ
    known = [TORCHRUN_VARIABLES, *([SLURM_VARIABLES] if "SLURM_STEP_ID" in env else []), *MPI_VARIABLES]
    names = next((names for names in known if names[0] in env and names[1] in env), None)
    if names is None:
        return None
    rank, world_size = _number(names[0]), _number(names[1])
    local_rank = _number(names[2]) if names[2] in env else 0
    local_world_size = _number(names[3]) if names[3] in env else None
    if rank >= world_size or local_rank >= (local_world_size or world_size):
        raise UserError(
            f"{names[0]}={rank}, {names[1]}={world_size}, {names[2]}={local_rank}: ranks count from 0 to one below "
            "their number; correct these variables, or unset them to let megalite start the ranks itself"
        )
    attempt = _number(ATTEMPT_VARIABLE) if ATTEMPT_VARIABLE in env else None
    return Place(rank, world_size, local_rank, _init_method(), attempt, env.get(TOKEN_VARIABLE, ""), local_world_size)


def _number(name: str) -> int:
    """A variable of the environment that is a whole number from 0 up."""
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"{name}: found {text!r} in the environment, expected a whole number; correct or unset it")
    return int(text)


def _init_method() -> str:
    env = os.environ
    if RENDEZVOUS_VARIABLE in env:
        return env[RENDEZVOUS_VARIABLE]
    host = env.get("MASTER_ADDR") or env.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1"
    port = _number("MASTER_PORT") if env.get("MASTER_PORT") else 20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000
    if port >= 1 << 16:
        raise UserError(f"MASTER_PORT: found {port} in the environment, expected 0 to 65535; correct or unset it")
    return f"tcp://{host}:{port}"
