"""The loss of a saved model on a packed set, in one process: what a run's validation would find of it.

So a model can be judged before it is trained further, on the answers that it is to learn, and afterwards.
"""

from __future__ import annotations

from pathlib import Path

from megalite.config.schema import SourceConfig
from megalite.data.loader import make_batch
from megalite.data.samples import Samples, open_validation_samples
from megalite.engine.steps import loss_weights
from megalite.errors import DataError
from megalite.stations.manifest import find_manifest
from megalite.tokenizer.tokenizer import Tokenizer
from megalite.train.device import choose_device
from megalite.train.evaluation.evaluator import SetLoss
from megalite.train.evaluation.offline import LONGEST_STREAM, SavedModel, build_stage, token_losses


def open_set(saved: SavedModel, packed: Path) -> tuple[Samples, int]:
    """A set that a model can be judged on, and tokens of a sequence of it; before any weight is read.

    Args:
        packed: a folder that `megalite data pack` made; documents do not see each other.

    Raises:
        DataError: it is none, is damaged, or was tokenized with another tokenizer than the model's.
    """
    manifest = find_manifest(packed) if packed.is_dir() else None
    if manifest is None or manifest.station != "pack":
        raise DataError(f"{packed}: no packed set; name a folder that `megalite data pack` or `prepare` made")
    seq_len = manifest.settings["seq_len"]
    samples = open_validation_samples([SourceConfig(path=packed)], seq_len=seq_len, document_masks=True)
    if any(source.is_paired for source in samples.sources):
        raise DataError(
            f"{packed}: pairs of answers, which have a loss beside a reference only: put them into data.valid"
        )
    if saved.tokenizer is not None:
        samples.check_tokenizer(Tokenizer.load(saved.tokenizer))
    samples.check_vocab_size(saved.model.vocab_size)
    if saved.model.positions == "learned" and seq_len > saved.model.max_positions:
        raise DataError(f"{packed}: packed with seq_len={seq_len}, the model reads {saved.model.max_positions} tokens")
    return samples, seq_len


def loss_on(saved: SavedModel, packed: Path) -> SetLoss:
    """The mean cross-entropy over all labels of a set, by their weights; refuses what `open_set` does."""
    samples, seq_len = open_set(saved, packed)
    device = choose_device("auto", 0)
    stage = build_stage(saved, device)
    total, num_tokens, weight, size = 0.0, 0, 0.0, max(1, LONGEST_STREAM // seq_len)
    for first in range(0, samples.num_samples_per_epoch, size):
        batch = make_batch(samples, first, min(size, samples.num_samples_per_epoch - first)).to(device)
        weights = loss_weights(batch).double()
        total += float((token_losses(stage, batch).double() * weights).sum())
        num_tokens, weight = num_tokens + int(batch.loss_mask.sum()), weight + float(weights.sum())
    return SetLoss(total, num_tokens, weight)
