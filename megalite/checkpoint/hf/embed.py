"""Embeddings of token sequences by a model in Hugging Face format: one vector of length 1 for each.

    ids of some documents, sorted by length -> padded to the longest of a batch -> hidden states of one layer
        -> pooled over the document's own tokens -> divided by their length

Nothing is downloaded, and no code of the folder is run. A batch is a function of the sequences that are given together,
so the same call gives the same bits; padding itself moves the last ones only (rounding of another matrix shape).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megalite.checkpoint.hf.encoder_files import PoolingKind, read_encoder
from megalite.errors import ConversionError, DataError, UnavailableError

Device = Literal["cpu", "cuda"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

UNUSED = "pooler."
"""Weights behind the hidden states, which some encoders name and many folders lack."""


class TextEmbedder:
    """Model and tokenizer of a folder.

    Args:
        folder: as `to_hugging_face` makes it, or a sentence encoder's.
        pooling: of the hidden states: their mean, or that of the last or first token.
        layer: whose hidden states; 0 is the table of embeddings, -1 the last one, behind the final norm.
        max_tokens: of a document, which is cut behind them; None for DEFAULT_TOKENS, or as many as the model has.
        dtype: in which it computes: fp32 or bf16.
        device: cpu or cuda.

    Raises:
        ConversionError: there is no model or tokenizer that can be trusted, or it has no such layer or positions.
        UnavailableError: there is no such device.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pooling: PoolingKind = "mean",
        layer: int = -1,
        max_tokens: int | None = None,
        dtype: str = "fp32",
        device: Device = "cpu",
    ):
        self.facts = read_encoder(Path(folder))
        self.pooling = self.facts.choose_pooling(pooling)
        self.layer = self.facts.choose_layer(layer)
        self.max_tokens = self.facts.choose_max_tokens(max_tokens)
        self._device = _choose_device(device)
        self._model, self._tokenizer = _load(self.facts.folder, DTYPES[dtype])
        self._model.to(self._device)
        ends = self._tokenizer.num_special_tokens_to_add()
        if self.max_tokens <= ends:
            raise ConversionError(
                f"{folder}: max_tokens={self.max_tokens}, and its tokenizer puts {ends} around each document; use "
                f"{ends + 1} or more"
            )

    def ids(self, texts: Sequence[str]) -> tuple[list[list[int]], np.ndarray]:
        """Token ids of texts, with what the tokenizer puts around them, cut to `max_tokens`.

        Returns:
            The ids of each, and whether it was cut, bool [texts].
        """
        found = self._tokenizer(list(texts), verbose=False)["input_ids"]
        cut = np.array([len(ids) > self.max_tokens for ids in found], bool)
        for number in np.flatnonzero(cut).tolist():  # with its own ends, where the tokenizer puts some
            found[number] = self._tokenizer(texts[number], truncation=True, max_length=self.max_tokens)["input_ids"]
        return found, cut

    def embed(self, sequences: Sequence[np.ndarray], batch_tokens: int) -> np.ndarray:
        """Embeddings of token sequences.

        Args:
            sequences: ids of each, none empty, none longer than `max_tokens`.
            batch_tokens: at once, padding among them; a sequence that is longer comes alone.

        Returns:
            float32 [sequences, hidden_size], in their order, each of length 1.

        Raises:
            DataError: a sequence has an embedding that is not finite, or 0.
        """
        vectors = np.empty((len(sequences), self.facts.hidden_size), np.float32)
        lengths = np.array([len(each) for each in sequences], np.int64)
        with torch.inference_mode():
            for chosen in _batches(lengths, batch_tokens):
                pooled = self._pooled([sequences[number] for number in chosen.tolist()], lengths[chosen])
                vectors[chosen] = (pooled / pooled.norm(dim=1, keepdim=True)).cpu().numpy()
        wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if wrong.size:
            raise EmbeddingError(int(wrong[0]), f"{self.facts.folder}: an embedding that is 0 or not finite")
        return vectors

    def _pooled(self, sequences: Sequence[np.ndarray], lengths: np.ndarray) -> Tensor:
        """Pooled hidden states of a batch, fp32 [batch, hidden_size]."""
        longest = int(lengths.max())
        ids = np.zeros((len(sequences), longest), np.int64)
        mask = np.arange(longest) < lengths[:, None]
        ids[mask] = np.concatenate(sequences)
        kept = torch.from_numpy(mask).to(self._device)
        is_last = self.layer == self.facts.num_layers
        given = {"input_ids": torch.from_numpy(ids).to(self._device), "attention_mask": kept.long()}
        out = self._model(**given, output_hidden_states=not is_last)
        states = (out.last_hidden_state if is_last else out.hidden_states[self.layer]).float()
        if self.pooling == "mean":
            return (states * kept[:, :, None]).sum(dim=1) / kept.sum(dim=1, keepdim=True)
        place = kept.sum(dim=1) - 1 if self.pooling == "last" else torch.zeros(len(sequences), dtype=torch.long)
        return states[torch.arange(len(sequences)), place]


class EmbeddingError(DataError):
    """A sequence whose embedding means nothing.

    Args:
        place: its number among the sequences.
        why: what is wrong with it.
    """

    def __init__(self, place: int, why: str):
        super().__init__(why)
        self.place = place


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes with one thread: other numbers of them round otherwise, and workers share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _batches(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Places of sequences of about one length, the longest first, so that what needs most memory fails at once."""
    order = np.argsort(-lengths, kind="stable")
    begin = 0
    while begin < order.size:
        count = max(1, batch_tokens // int(lengths[order[begin]]))
        yield order[begin : begin + count]
        begin += count


def _choose_device(device: Device) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnavailableError("device=cuda: torch finds no GPU here; use device=cpu")
    return torch.device("cuda", os.getpid() % torch.cuda.device_count())  # workers have one number after another


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # of a head that it leaves out; what lacks is told here
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loaded: Any = AutoModel.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # damage makes it raise anything
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConversionError(f"{folder}: transformers cannot load it: {why}") from error
    model, loading = loaded
    if lacking := sorted(name for name in loading["missing_keys"] if UNUSED not in name):
        raise ConversionError(
            f"{folder}: {', '.join(lacking[:3])} of {len(lacking)} tensors are not there, and transformers would make "
            "them up; convert or copy the folder anew"
        )
    for name, weight in model.named_parameters():
        if UNUSED not in name and not weight.isfinite().all():
            raise ConversionError(f"{folder}: {name} holds NaN or infinite numbers; take a checkpoint from before")
    model.config.use_cache = False
    return model.eval(), tokenizer
