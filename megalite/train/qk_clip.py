"""QK-clip over a run: logits are measured before a step, and what they say scales weights behind its update."""

from __future__ import annotations

from torch import Tensor

from megalite.config.sections.optimizer import QkClipConfig
from megalite.engine.protocol import Engine
from megalite.monitor.attention_logits import AttentionLogits
from megalite.optim.qk_clip import row_scales
from megalite.parallel.axes import Axes
from megalite.train.components.component import Step


class QkClip:
    """See `optim.qk_clip`. It has no state: what it does follows from a step's weights and batch."""

    def __init__(self, settings: QkClipConfig, engine: Engine, axes: Axes):
        self._settings, self._engine = settings, engine
        self._logits = AttentionLogits(engine.stage, axes)

    def scales(self, step: Step) -> dict[str, Tensor]:
        """Factors of rows of weights, by name; none in a step that is not measured. Collective."""
        if step.number % self._settings.every:
            return {}
        largest = self._logits.measure(lambda: self._engine.eval_step(step.batches))
        step.figures["qk_logit_max"] = float(largest.max())
        step.figures["qk_clipped_heads"] = int((largest > self._settings.threshold).sum())
        return row_scales(largest, self._settings.threshold, self._engine.stage.spec.model)
