"""megalite: large-scale pretraining that fits in one head.

Tensor, pipeline and data parallelism on DeepSpeed's ZeRO engines, the data tools that feed them, and checkpoints
that go to any layout and to Hugging Face. Everything runs on two CPU cores over gloo exactly as it does on GPUs.

What can be imported from here is stated in `__all__`, and stays; it is loaded when it is first used (docs/library.md).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megalite.checkpoint.hf.exporter import to_hugging_face
    from megalite.checkpoint.hf.to_checkpoint import from_hugging_face
    from megalite.config.load import load_config
    from megalite.config.schema import Config
    from megalite.corpus.prepare import load_recipe
    from megalite.corpus.prepare import prepare as prepare_data
    from megalite.errors import UserError
    from megalite.library import batches, build_model, loss, plan_run, run_training
    from megalite.model.transformer import documents_of

_PLACES = {
    "Config": "config.schema:Config",
    "UserError": "errors:UserError",
    "batches": "library:batches",
    "build_model": "library:build_model",
    "documents_of": "model.transformer:documents_of",
    "from_hugging_face": "checkpoint.hf.to_checkpoint:from_hugging_face",
    "load_config": "config.load:load_config",
    "load_recipe": "corpus.prepare:load_recipe",
    "loss": "library:loss",
    "plan_run": "library:plan_run",
    "prepare_data": "corpus.prepare:prepare",
    "run_training": "library:run_training",
    "to_hugging_face": "checkpoint.hf.exporter:to_hugging_face",
}

__all__ = [
    "Config",
    "UserError",
    "batches",
    "build_model",
    "documents_of",
    "from_hugging_face",
    "load_config",
    "load_recipe",
    "loss",
    "plan_run",
    "prepare_data",
    "run_training",
    "to_hugging_face",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _PLACES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
