"""README.md of an exported model: what it is, how it was trained and on what; nothing that was not recorded.

Paths of the machine that trained it stay out: a card is for the public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megalite.architecture.architecture import Architecture
from megalite.architecture.costs import count_parameters
from megalite.checkpoint.format import Manifest
from megalite.checkpoint.hf.provenance import DataSet, DataSource, Provenance
from megalite.checkpoint.hf.verify import Verdict

FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- megalite\n- pretrained\n---\n"
"""Read by the hub. No licence: whoever publishes a model chooses it."""


def write_card(
    name: str,
    model: Architecture,
    manifest: Manifest,
    provenance: Provenance,
    verdict: Verdict,
    *,
    dtype: str,
    alarms: Sequence[str],
) -> str:
    """The text of the card.

    Args:
        name: title.
        model: filled.
        manifest: of the checkpoint that was exported.
        provenance: of that checkpoint.
        verdict: of the verification.
        dtype: number format of the files.
        alarms: what must be read before anything else.
    """
    sections = [
        f"{FRONT}\n# {name}\n",
        *(f"> **{alarm}**\n" for alarm in alarms),
        _summary(model, provenance),
        _loading(name),
        _table("Model", {**_model_rows(model), "number format": dtype}),
        _table("Training", _training_rows(manifest, provenance)),
        _data(provenance.data),
        _checks(verdict),
    ]
    return "\n".join(section for section in sections if section)


def _summary(model: Architecture, provenance: Provenance) -> str:
    begin = f", going on from {_plain(provenance.origin.name)}" if provenance.origin else ""
    return (
        f"A decoder-only language model of {count_parameters(model):,} parameters, pretrained with megalite{begin}. "
        "It continues text; it has not been tuned to follow instructions or to chat.\n"
    )


def _model_rows(model: Architecture) -> dict[str, object]:
    positions = f"learned, {model.max_positions}"
    if model.positions == "rope":
        positions = f"rotary, theta {model.rope.theta:g}, up to {model.max_positions}"
        if model.rope.scaling is not None:
            positions += f", {model.rope.scaling.type} scaling by {model.rope.scaling.factor:g}"
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


def _training_rows(manifest: Manifest, provenance: Provenance) -> dict[str, object]:
    progress, losses = manifest.progress, provenance.losses
    rows: dict[str, object] = {"training step": f"{progress.step:,}"}
    if provenance.total_steps is not None:
        rows["training step"] = f"{progress.step:,} of {provenance.total_steps:,}"
    if progress.num_updates < progress.step:
        rows["steps that changed the weights"] = f"{progress.num_updates:,}"
    rows["tokens trained on"] = f"{progress.num_tokens:,}"
    if losses is not None:
        rows["training loss"] = f"{losses.mean:.4f}, mean of the last steps"
    if provenance.validation is not None:
        step, loss = provenance.validation
        rows["validation loss"] = f"{loss:.4f} at step {step:,}"
    if provenance.origin is not None:
        licence = f", licence {provenance.origin.license}" if provenance.origin.license else ""
        rows["began as"] = provenance.origin.name + licence
    rows |= _hyper_parameters(provenance.config) if provenance.config else {}
    if manifest.layout:
        rows["layout"] = ", ".join(f"{axis}={size}" for axis, size in manifest.layout.items())
    if manifest.data.get("fingerprint"):
        rows["fingerprint of the data"] = manifest.data["fingerprint"]
    return {**rows, "megalite": manifest.megalite or "unknown"}


def _hyper_parameters(config: Mapping[str, Mapping]) -> dict[str, object]:
    """Of a run's resolved config; a setting that another version did not have is left out."""
    rows: dict[str, object] = {}
    for title, say in SETTINGS.items():
        try:
            rows[title] = say(config)
        except (KeyError, TypeError):
            continue
    return rows


def _batch(config: Mapping[str, Mapping]) -> str:
    size, length = config["batch"]["global_batch_size"], config["batch"]["seq_len"]
    return f"{size:,} sequences of {length:,} tokens, {size * length:,} tokens"


def _optimizer(config: Mapping[str, Mapping]) -> str:
    it = config["optimizer"]
    betas = " and ".join(f"{beta:g}" for beta in it["betas"])
    return f"{it['name']}, betas {betas}, eps {it['eps']:g}, weight decay {it['weight_decay']:g}"


def _clipping(config: Mapping[str, Mapping]) -> str:
    norm = config["optimizer"]["clip_grad_norm"]
    return "none" if norm is None else f"norm {norm:g}"


def _learning_rate(config: Mapping[str, Mapping]) -> str:
    schedule = config["schedule"]
    return (
        f"{config['optimizer']['lr']:g}, {schedule['name']} to {schedule['min_lr']:g}, "
        f"{schedule['warmup_steps']:,} steps of warm-up"
    )


SETTINGS: Mapping[str, Callable[[Mapping[str, Mapping]], object]] = {
    "batch": _batch,
    "optimizer": _optimizer,
    "gradient clipping": _clipping,
    "learning rate": _learning_rate,
    "precision": lambda config: config["precision"]["dtype"],
    "attention across documents": lambda config: "no" if config["data"]["document_masks"] else "yes",
    "seed": lambda config: config["run"]["seed"],
}
"""Rows of the card, from a run's resolved config."""


def _table(title: str, rows: Mapping[str, object]) -> str:
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *(f"| {key} | {_plain(rows[key])} |" for key in rows), ""])


def _data(sets: Sequence[DataSet]) -> str:
    """What the model learned from, as far as data cards say; an empty text when nothing is known."""
    if not sets:
        return ""
    head = ["## Data\n", "| set | weight | source | what it is | licence | documents | MB of text |", "|" + "---|" * 7]
    rows = []
    for each in sets:
        for source in each.sources or (None,):
            cells = _cells(source) if source else ["not described"] + [""] * 4
            rows.append("| " + " | ".join([_plain(each.name), f"{each.weight:g}", *cells]) + " |")
    return "\n".join([*head, *rows, "", "The licences are those that the data's own card states for its sources.\n"])


def _cells(source: DataSource) -> list[str]:
    name = f"[{_plain(source.name)}]({source.url})" if source.url else _plain(source.name)
    size = "" if source.text_bytes is None else f"{source.text_bytes / 1e6:,.1f}"
    return [
        name,
        _plain(source.description or ""),
        _plain(source.license or "not stated"),
        f"{source.documents:,}",
        size,
    ]


def _plain(value: object) -> str:
    """Text that stays inside its cell."""
    return " ".join(str(value).replace("|", "\\|").split())


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
        f"## Checked when it was made\n\nRead back by transformers {verdict.transformers} in a fresh process: "
        f"{verdict.num_weights} weights equal bit by bit, logits of {verdict.num_tokens:,} tokens within "
        f"{verdict.max_difference:.1e} of megalite's and every prediction equal{texts}.\n"
    )
