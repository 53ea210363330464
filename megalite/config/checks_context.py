"""What must hold between context parallelism and the model."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.architecture.architecture import Architecture
from megalite.architecture.attentions import ATTENTIONS
from megalite.config.schema import Config
from megalite.config.wording import divisors, or_, unused


def check_context(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about `parallel.cp` and its kind."""
    parallel = config.parallel
    if parallel.cp == 1:
        yield from unused(parallel, ("cp_kind",), "parallel", "cp=1")
        return
    if parallel.cp_kind == "ulysses":
        yield from _heads(config, model)
    elif ATTENTIONS[model.attention].function is not None:
        yield (
            f"parallel.cp_kind: attention={model.attention} is a plug-in's, which is given whole documents; use "
            "cp_kind=ulysses, which exchanges tokens for heads"
        )
    elif parallel.cp_kind == "ring" and model.attention_sinks:
        yield "parallel.cp_kind: ring does not count attention_sinks; use cp_kind=allgather or ulysses"
    elif parallel.cp_kind == "ring" and model.attention_dropout:
        yield (
            f"parallel.cp_kind: ring drops no weights, which attention_dropout={model.attention_dropout:g} asks for; "
            "use cp_kind=allgather or ulysses"
        )
    elif parallel.cp_kind == "ring" and model.attention_soft_cap is not None:
        yield (
            f"parallel.cp_kind: ring does not bound scores, which attention_soft_cap={model.attention_soft_cap:g} "
            "asks for; use cp_kind=allgather or ulysses"
        )


def _heads(config: Config, model: Architecture) -> Iterator[str]:
    """Ulysses gives each rank as many heads; key and value heads are repeated where there are too few."""
    cp, tp = config.parallel.cp, config.parallel.tp
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    if model.num_heads % tp or (model.num_kv_heads % tp and tp % model.num_kv_heads):
        return  # said elsewhere
    fitting = [size for size in divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0]
    if cp not in fitting:
        yield (
            f"parallel.cp_kind: ulysses gives each of cp={cp} ranks as many heads, and a tensor-parallel rank has "
            f"{heads}, with {kv_heads} for keys and values; use cp={or_(fitting)}, or cp_kind=allgather"
        )
