"""Components and metrics that plug-ins bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megalite.addition import made, naming
from megalite.config.brought import COMPONENTS, METRICS
from megalite.config.schema import Config
from megalite.engine.protocol import StepResult
from megalite.train.components.component import Component, Context, Step


class BroughtMetrics(Component):
    """Numbers that functions of plug-ins find, in every step's line."""

    name, is_brought = "plugin_metrics", True

    def __init__(self, metrics: dict[str, Callable[..., float]], context: Context):
        self._metrics, self._context = metrics, context

    def measure(self, step: Step, result: StepResult) -> None:
        for name, find in self._metrics.items():
            with naming(f"metric {name}"):
                step.figures[name] = find(step, result, self._context)


def brought_components(config: Config, context: Context) -> Iterator[Component]:
    """Make the components that a config names, in its order.

    Raises:
        PluginError: one cannot be made.
    """
    if config.monitor.metrics:
        chosen = config.monitor.metrics.items()
        yield BroughtMetrics({name: METRICS[name].bound(options or {}) for name, options in chosen}, context)
    for name, options in config.train.components.items():
        component = made(f"train.components.{name}", COMPONENTS[name].bound(options or {}), context)
        component.name, component.is_brought = name, True
        yield component
