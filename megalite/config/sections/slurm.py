"""The section `slurm`: how a launched run is watched."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from megalite.section import Section


class SlurmConfig(Section):
    """How `megalite launch` watches over a run. What belongs to the cluster is in its profile (`configs/clusters/`)."""

    beat_seconds: PositiveFloat = 30.0
    """A rank without a heartbeat for so long is frozen, or its node is: the attempt is ended, and another started."""
    start_seconds: PositiveFloat = 1800.0
    """Longest way from the start to the first step: imports, compilation, reading a large checkpoint."""
    step_seconds: PositiveFloat = 600.0
    """Longest stay of all ranks in one phase of a step; raise it when a step, a validation or a save takes longer. Also
    without a launch it ends a rank that was asked to stop and does not come to the end of its step."""
    max_failures: PositiveInt = 3
    """Failures in a row without a new checkpoint after which the chain of jobs ends and says why."""
    probe_seconds: PositiveFloat = 30.0
    """How often each rank times a small product of its own, by which slow ranks are found."""
    node_seconds: PositiveFloat = 15.0
    """How often Slurm is asked which nodes of the run it has lost sight of; the run saves before they are taken out."""
    check_nodes: bool = True
    """Measure every node and the network between them before an attempt, and leave out what is broken or slow."""
