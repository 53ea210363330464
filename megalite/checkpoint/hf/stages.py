"""What a conversion is doing: minutes pass with a large model, and whoever waits wants to know of what."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
"""Is told what begins."""

WRITING = "writing the weights"
CHECKING_AND_WRITING = "checking the checkpoint's files, writing the weights"
COMPARING = "reading every weight back"
RELOADING = "loading it with transformers in a fresh process"
COMPUTING = "computing the same logits with megalite"


def silent(_: str) -> None:
    """For whoever does not want to know."""
