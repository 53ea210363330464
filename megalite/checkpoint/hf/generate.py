"""Text from a Hugging Face folder, by transformers' own generation: what a user of an exported model would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megalite.checkpoint.hf.config_json import FILE_NAME
from megalite.errors import ConversionError


def generate(folder: Path, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.8, seed: int = 0) -> str:
    """Continue a text.

    Args:
        folder: model and tokenizer, as `to_hugging_face` makes it. Nothing is downloaded.
        prompt: the beginning. An empty one starts a new document, as training saw it: behind an end-of-text token.
        max_new_tokens: tokens to add at most; the end-of-text token ends the text sooner.
        temperature: of the sampling; 0 takes the likeliest token each time.
        seed: of the sampling.

    Returns:
        The prompt and what follows it.

    Raises:
        ConversionError: there is no model or tokenizer in the folder, or the text would be longer than the model.
    """
    folder = Path(folder)
    if not (folder / FILE_NAME).is_file():
        raise ConversionError(f"{folder}: no {FILE_NAME}; give a folder made by `megalite convert to-hf`")
    model, tokenizer = _load(folder)
    ids = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]
    longest = model.config.max_position_embeddings
    if len(ids) + max_new_tokens > longest:
        raise ConversionError(
            f"{len(ids)} tokens of prompt and {max_new_tokens} new ones are more than the model's {longest} positions; "
            f"use --max-new-tokens {max(0, longest - len(ids))} or a shorter prompt"
        )
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    inputs = torch.tensor([ids])
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    return prompt + tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def _load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # of what it leaves out, as layers that predict further; what lacks is told here
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:  # as damage has made it raise
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
