"""Text from a Hugging Face folder, token by token: transformers' model with its cache, our sampling.

A text is a function of the folder, its prompt, the settings, the seed, and its numbers among prompts and samples: what
else is generated, and in what order, does not matter.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.hf.config_json import FILE_NAME
from megalite.checkpoint.hf.sampling import Sampling, draw
from megalite.checkpoint.hf.text_stream import TextStream
from megalite.errors import ConversionError
from megalite.parallel.random import name_seed

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""What SentencePiece calls a byte of a character that it has no token of."""


@dataclass(frozen=True)
class GenerationSettings:
    """What is generated behind a prompt.

    Raises:
        ConversionError: a stop string is empty.
    """

    max_new_tokens: int = 64
    """The end-of-text token ends a text sooner."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stops: tuple[str, ...] = ()
    """Texts that end a text, and are left out of it."""

    def __post_init__(self) -> None:
        if "" in self.stops:
            raise ConversionError("stop: found an empty text, which every text has; leave it out")


class Continuation:
    """A text that grows while it is iterated over: pieces of it, each as soon as it is certain."""

    def __init__(self, prompt: str, pieces: Iterator[str]):
        self.prompt, self._pieces = prompt, pieces
        self.text = ""
        """What follows the prompt, so far."""
        self.num_tokens = 0
        """New ones, so far."""
        self.ended_by = ""
        """`length`, `end-of-text` or `stop`; empty until it has ended."""

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self.text += piece
            yield piece

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "num_tokens": self.num_tokens,
            "ended_by": self.ended_by,
        }


class TextModel:
    """Model and tokenizer of a folder. Nothing is downloaded.

    Args:
        folder: as `to_hugging_face` makes it.

    Raises:
        ConversionError: there is no model or tokenizer in it that can be trusted.
    """

    def __init__(self, folder: Path):
        folder = Path(folder)
        if not (folder / FILE_NAME).is_file():
            raise ConversionError(f"{folder}: no {FILE_NAME}; give a folder made by `megalite convert to-hf`")
        self._model, self._tokenizer = _load(folder)
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        # Of a window of one token transformers keeps all that came before (`[-window + 1 :]`)
        self._caches = getattr(self._model.config, "sliding_window", None) != 1
        self._switch = _switch_of_rope(self._model.config)
        self._ends = {end for end in (*ends, self._tokenizer.eos_token_id) if end is not None}

    def require_room(self, prompts: Sequence[str], max_new_tokens: int) -> None:
        """Raises ConversionError: a text would be longer than the model, or has nothing to begin with."""
        longest = self._model.config.max_position_embeddings
        for number, prompt in enumerate(prompts, start=1):
            length = len(self._ids(prompt))
            if length + max_new_tokens > longest:
                where = f"prompt {number}: " if len(prompts) > 1 else ""
                raise ConversionError(
                    f"{where}{length} tokens of prompt and {max_new_tokens} new ones are more than the model's "
                    f"{longest} positions; use --max-new-tokens {max(0, longest - length)} or a shorter prompt"
                )

    def continue_text(
        self, prompt: str, settings: GenerationSettings, *, number: int = 0, sample: int = 0
    ) -> Continuation:
        """A text that begins so. An empty prompt starts a new document, as training saw it: behind the end of another.

        Args:
            number: of the prompt among others.
            sample: of several that follow it.

        Raises:
            ConversionError: it would be longer than the model, or there is nothing that it could begin with.
        """
        self.require_room([prompt], settings.max_new_tokens)
        seed = settings.seed if (number, sample) == (0, 0) else name_seed(settings.seed, f"{number}/{sample}")
        found = Continuation(prompt, iter(()))
        found._pieces = self._pieces(self._ids(prompt), settings, torch.Generator().manual_seed(seed), found)
        return found

    def _ids(self, prompt: str) -> list[int]:
        ids = self._tokenizer(prompt)["input_ids"] or [self._tokenizer.eos_token_id]
        if ids == [None]:
            raise ConversionError(
                f"prompt: found {prompt!r}, of which the tokenizer makes no tokens, and it has no end-of-text token "
                "for a text to begin behind; give a prompt with text"
            )
        return ids

    def _pieces(
        self, ids: list[int], settings: GenerationSettings, generator: torch.Generator, found: Continuation
    ) -> Iterator[str]:
        stream, cache = TextStream(self._decode, settings.stops, self._is_byte), None
        taken = inspect.signature(self._model.forward).parameters
        name = "cache" if "cache" in taken else "past_key_values"  # its name in newer generations of transformers
        num_cached = 0
        for _ in range(settings.max_new_tokens):
            if not self._caches or num_cached == self._switch:
                cache, num_cached = None, 0
            with torch.inference_mode():
                out = self._model(
                    torch.tensor([ids[num_cached:]]), **{name: cache}, use_cache=self._caches, logits_to_keep=1
                )
                token = draw(out.logits[0, -1], settings.sampling, generator)
            cache, num_cached, ids = out.get(name), len(ids), [*ids, token]
            found.num_tokens += 1
            if token in self._ends:
                found.ended_by = "end-of-text"
                break
            yield stream.push(token)
            if stream.stopped_by is not None:
                found.ended_by = "stop"
                return
        yield stream.finish()
        found.ended_by = "stop" if stream.stopped_by is not None else found.ended_by or "length"

    def _is_byte(self, token: int) -> bool:
        return BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or "") is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def generate(folder: Path, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.8, seed: int = 0) -> str:
    """Continue a text; the prompt and what follows it. See `TextModel`, which does more, and raises the same."""
    settings = GenerationSettings(max_new_tokens, Sampling(temperature), seed)
    return prompt + "".join(TextModel(folder).continue_text(prompt, settings))


def _switch_of_rope(config: Any) -> int | None:
    """Tokens beyond which longrope turns by its long factors: what was cached up to there is of the short ones."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (found, *found.values()):  # some have one for each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "longrope":
            at_top = getattr(config, "original_max_position_embeddings", None)
            return at_top or rope.get("original_max_position_embeddings", config.max_position_embeddings)
    return None


def _load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # of what it leaves out, as layers that predict further; what lacks is told here
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damage makes it raise anything
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConversionError(
            f"{folder}: transformers cannot load it: {why} (`megalite convert from-hf` says more)"
        ) from error
    model, loading = loaded
    if lacking := sorted(loading["missing_keys"]):
        raise ConversionError(
            f"{folder}: {', '.join(lacking[:3])} of {len(lacking)} tensors are not there, and transformers would make "
            "them up; convert or copy the folder anew"
        )
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ConversionError(f"{folder}: {name} holds NaN or infinite numbers; take a checkpoint from before")
    return model.eval(), tokenizer
