"""README.md of an exported model: what it is, where it comes from, how to load it; nothing that was not recorded."""

from __future__ import annotations

from megalite.checkpoint.format import Manifest
from megalite.checkpoint.hf.verify import Verdict
from megalite.config.plan import count_parameters
from megalite.config.schema import ModelConfig

IMPORTED_FROM = "imported_from"
"""Key of a manifest's `data` in a checkpoint that `from-hf` made: name of the Hugging Face folder."""

UNTRAINED = "This model has not been trained: its weights are random."


def is_untrained(manifest: Manifest) -> bool:
    """Whether the weights are still those that a run begins with."""
    return manifest.progress.step == 0 and IMPORTED_FROM not in manifest.data


def write_card(name: str, model: ModelConfig, manifest: Manifest, verdict: Verdict, *, dtype: str) -> str:
    """The text of the card.

    Args:
        name: title.
        model: filled.
        manifest: of the checkpoint that was exported.
        verdict: of the verification.
        dtype: number format of the files.
    """
    front = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- megalite\n- pretrained\n---\n"
    warning = f"\n> **{UNTRAINED}**\n" if is_untrained(manifest) else ""
    rows = {**_model_rows(model), **_training_rows(manifest), "number format": dtype}
    table = "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])
    return f"{front}\n# {name}\n{warning}\n{_summary(model)}\n\n{table}\n\n{_loading(name)}\n{_checks(verdict)}"


def _summary(model: ModelConfig) -> str:
    return (
        f"A decoder-only language model of {count_parameters(model):,} parameters, pretrained with megalite. It "
        "continues text; it has not been tuned to follow instructions or to chat."
    )


def _model_rows(model: ModelConfig) -> dict[str, object]:
    positions = f"learned, {model.max_positions}"
    if model.positions == "rope":
        positions = f"rotary, theta {model.rope.theta:g}, up to {model.max_positions}"
    return {
        "blocks": model.num_layers,
        "hidden size": model.hidden_size,
        "heads": f"{model.num_heads} of {model.head_dim} channels, {model.num_kv_heads} for keys and values",
        "MLP": f"{model.activation}, {model.ffn_hidden_size} wide",
        "vocabulary": model.vocab_size,
        "positions": positions,
        "sliding window": model.sliding_window or "none",
        "embeddings": "tied" if model.tie_embeddings else "not tied",
    }


def _training_rows(manifest: Manifest) -> dict[str, object]:
    progress, layout = manifest.progress, manifest.layout
    rows: dict[str, object] = {"training step": f"{progress.step:,}", "tokens trained on": f"{progress.num_tokens:,}"}
    if IMPORTED_FROM in manifest.data:
        rows["began as"] = manifest.data[IMPORTED_FROM]
    if layout:
        rows["trained on"] = ", ".join(f"{axis}={size}" for axis, size in layout.items())
    return {**rows, "megalite": manifest.megalite or "unknown"}


def _loading(name: str) -> str:
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


def _checks(verdict: Verdict) -> str:
    texts = f"; {verdict.num_texts} texts gave equal ids" if verdict.num_texts else ""
    return (
        f"Checked when it was made: read back by transformers {verdict.transformers} in a fresh process, "
        f"{verdict.num_weights} weights equal bit by bit, logits of {verdict.num_tokens:,} tokens within "
        f"{verdict.max_difference:.1e} of megalite's{texts}.\n"
    )
