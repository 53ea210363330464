"""Parameters that stay as they are."""

from __future__ import annotations

from torch import nn

from megalite.config.schema import OptimizerConfig
from megalite.config.weight_groups import group_of
from megalite.model.initialize import stage_weights
from megalite.model.transformer import Stage


def still_and_trained(stage: Stage, optimizer: OptimizerConfig) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of which all stays as it is, and the others. Where nothing of a stage is trained, which every step has
    to go through all the same, the last of its smallest parameters counts as trained: its gradients are made, and
    forgotten."""
    parameters = dict(stage.named_parameters())
    of_rows = ((name, [group_of(row.name, optimizer) for row in rows]) for name, rows in stage_weights(stage))
    frozen = {name for name, groups in of_rows if all(group is not None and group.frozen for group in groups)}
    if len(frozen) == len(parameters):
        frozen.remove(min(reversed(parameters), key=lambda name: parameters[name].numel()))
    still = [parameter for name, parameter in parameters.items() if name in frozen]
    return still, [parameter for name, parameter in parameters.items() if name not in frozen]
