"""What must hold where products of tensor-parallel layers send through memory that GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.engine import choose_engine
from megalite.config.schema import Config


def check_async_tp(config: Config) -> Iterator[str]:
    """Complaints about `parallel.async_tp`."""
    parallel = config.parallel
    if not parallel.async_tp:
        return
    if parallel.tp == 1 or not parallel.sequence_parallel:
        found = "tp=1" if parallel.tp == 1 else "sequence_parallel=false"
        yield (
            f"parallel.async_tp: found with {found}, and it sends what sequence parallelism gathers and sums over tp; "
            "use tp=2 or more with sequence_parallel=true, or false"
        )
    if config.train.device == "cpu":
        yield "parallel.async_tp: needs GPUs that share memory, and train.device=cpu; use false"
    if (engine := choose_engine(config)) != "native":
        yield (
            f"parallel.async_tp: engine={engine} makes gradients of weights by itself, beside which messages would "
            "travel; use engine=native with zero_stage=0 or 1, or false"
        )
    for section, name in ((config.precision, "fp8"), (config.precision, "fp4"), (config.precision, "qat")):
        if getattr(section, name) is not None:
            yield f"parallel.async_tp: precision.{name} multiplies by itself; use {name}=null, or async_tp=false"
    if config.model.lora is not None:
        yield "parallel.async_tp: products with adapters are made in parts; use model.lora=null, or async_tp=false"
