"""A Hugging Face folder that training is to start from, compared with what megalite computes from it.

Reading a folder is a closed world (`settings.py`), but the code of transformers may know more than its config says, so
its word is asked once. As many blocks are run as fit into memory, at most what a rank can do while others wait.
"""

from __future__ import annotations

from pathlib import Path

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import count_parameters
from megalite.checkpoint.hf.importer import HuggingFaceWeights
from megalite.checkpoint.hf.memory import fitting_blocks
from megalite.checkpoint.hf.verify import compare_logits

MOST_PARAMETERS = 2e9
"""Of the blocks that are run: about a minute on a few cores. What a block computes, the first ones show."""


def prove(folder: Path) -> str:
    """Compare logits of a folder; a sentence about what was found equal.

    Raises:
        ConversionError: transformers computes something else, or cannot read the folder; or not even the embedding
            and one block fit into memory.
    """
    source = HuggingFaceWeights(folder)
    model = source.model
    num_blocks = min(fitting_blocks(model), _quick_blocks(model))
    answer = compare_logits(folder, source, model, num_blocks)
    blocks = f"all {num_blocks} blocks" if num_blocks == model.num_layers else f"the first {num_blocks} blocks"
    return (
        f"logits through {blocks} equal those of transformers {answer.transformers} (largest difference "
        f"{answer.max_difference:.1e})"
    )


def _quick_blocks(model: Architecture) -> int:
    """Blocks with about MOST_PARAMETERS, embeddings left aside; at least one."""
    with_one, with_two = (count_parameters(model.model_copy(update={"num_layers": number})) for number in (1, 2))
    return max(1, min(model.num_layers, int(MOST_PARAMETERS / (with_two - with_one))))
