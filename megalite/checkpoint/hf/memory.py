"""Whether the proof of a conversion fits into memory, asked before anything is written.

Converting takes next to none; running the model to compare its logits takes all of its weights, in one process after
the other.
"""

from __future__ import annotations

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import count_parameters
from megalite.checkpoint.hf.probes import make_probes
from megalite.errors import ConversionError
from megalite.host import available_bytes

BYTES_PER_PARAMETER = 6
"""fp32, and half of that again for the files mapped into memory and activations."""

BYTES_PER_LOGIT = 4


def require_memory(model: Architecture, num_blocks: int | None = None) -> None:
    """Refuse, before anything is written, what would end in the kernel's killing one of the two processes.

    Args:
        model: filled.
        num_blocks: as for `verify`.

    Raises:
        ConversionError: with the number of blocks that would fit; or `num_blocks` is below 1.
    """
    if num_blocks is not None and num_blocks < 1:
        raise ConversionError(f"found verify_blocks={num_blocks}, expected 1 or more, or None for all blocks")
    wanted = min(num_blocks or model.num_layers, model.num_layers)
    fitting = _num_fitting(model)
    if wanted > fitting:
        raise _too_little(model, wanted, f", or run only the first blocks: --verify-blocks {fitting}" * (fitting > 0))


def fitting_blocks(model: Architecture) -> int:
    """How many of a filled model's blocks can be run to compare logits; all of them where they fit.

    Raises:
        ConversionError: not even one.
    """
    fitting = _num_fitting(model)
    if fitting < 1:
        raise _too_little(model, 1, "")
    return min(fitting, model.num_layers)


def _num_fitting(model: Architecture) -> int:
    with_one, with_two = (_bytes_to_run(model, number) for number in (1, 2))
    return max(0, (available_bytes() - with_one) // (with_two - with_one) + 1)


def _too_little(model: Architecture, num_blocks: int, advice: str) -> ConversionError:
    blocks = "the model" if num_blocks == model.num_layers else f"{num_blocks} block{'s' * (num_blocks > 1)} of it"
    return ConversionError(
        f"running {blocks} to compare logits takes about {_bytes_to_run(model, num_blocks) / 1e9:.1f} GB of memory, "
        f"and {available_bytes() / 1e9:.1f} GB are available; use a machine with more{advice}"
    )


def _bytes_to_run(model: Architecture, num_blocks: int) -> int:
    """Memory that either process takes: the weights of some blocks, and all logits."""
    num_parameters = count_parameters(model.model_copy(update={"num_layers": num_blocks}))
    num_logits = model.vocab_size * sum(len(probe.tokens) for probe in make_probes(model))
    return num_parameters * BYTES_PER_PARAMETER + num_logits * BYTES_PER_LOGIT
