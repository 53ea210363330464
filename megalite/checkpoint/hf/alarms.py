"""What whoever uses an exported model must know before anything else: that it is not trained, or broken, or unfinished.

An exporter that checks only itself turns a run that went wrong into a folder that loads. Each sentence here is printed
by the command and, where it is about the model itself, stands at the top of its card.
"""

from __future__ import annotations

import math

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.format import Manifest
from megalite.checkpoint.hf.provenance import IMPORTED_FROM, UPCYCLED_FROM, UPDATES_BEFORE, Losses, Provenance

UNTRAINED = "This model has not been trained: its weights are random."

UPCYCLED = (
    "This model has not been trained since it was given experts: those of a block are equal, and its router is random."
)

WORSE_BY = 0.5
"""Nats above the best mean of the run from which a loss counts as diverged; a change of mixture moves it less."""


def find_alarms(manifest: Manifest, model: Architecture, provenance: Provenance) -> list[str]:
    """What is wrong with a model, a sentence each, the worst first.

    Args:
        manifest: of the checkpoint.
        model: filled.
        provenance: of the checkpoint.
    """
    untrained = _untrained(manifest, provenance)
    if untrained:
        return [untrained]
    alarms = _of_losses(provenance.losses, model) if provenance.losses else []
    step, last = manifest.progress.step, provenance.total_steps
    if last is not None and step < last and not provenance.ended_early:
        alarms.append(f"This is step {step:,} of a run that goes to step {last:,}: training is not finished.")
    return alarms


def _untrained(manifest: Manifest, provenance: Provenance) -> str | None:
    """Whether the weights are still those that the run began with."""
    progress, data = manifest.progress, manifest.data
    if progress.num_updates:
        return None
    if UPCYCLED_FROM in data:
        was_random = data.get(UPDATES_BEFORE) == 0 and IMPORTED_FROM not in data
        return UNTRAINED if was_random else UPCYCLED
    if IMPORTED_FROM in data:
        return None
    if provenance.origin is not None:
        return f"This model has not been trained further: its weights are those of {provenance.origin.name}."
    skipped = f" All of its {progress.step:,} steps were skipped." if progress.step else ""
    return UNTRAINED + skipped


def _of_losses(losses: Losses, model: Architecture) -> list[str]:
    chance = math.log(model.vocab_size)
    if not math.isfinite(losses.mean):
        return [f"The loss of the last steps is {losses.mean}: training had diverged. Export an older checkpoint."]
    if losses.mean >= chance:
        return [
            f"The training loss is {losses.mean:.2f}, and guessing among {model.vocab_size:,} tokens gives "
            f"{chance:.2f}: this model has learned nothing."
        ]
    if losses.mean > losses.best + WORSE_BY:
        return [
            f"The training loss is {losses.mean:.2f} and was {losses.best:.2f} at step {losses.best_step:,}: training "
            "had diverged. Export an older checkpoint."
        ]
    return []
