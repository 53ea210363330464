"""Tests on a real Slurm cluster: see `tests/kit/slurm.py`."""

from tests.kit.slurm import cluster, cluster_of_session

__all__ = ["cluster", "cluster_of_session"]
