"""How many tokens a micro-batch's stream has, and what must divide them."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from megalite.config.schema import Config
from megalite.config.wording import near, or_

FP8_MULTIPLE = {"current": 16, "delayed": 16, "rowwise": 16, "block": 16, "mxfp8": 32, "nvfp4": 32}
"""By recipe, what divides the sides of every matrix that is multiplied in FP8 on a GPU."""


def stream_unit(config: Config) -> int:
    """What must divide the tokens of a micro-batch.

    Context parallelism gives every rank as many, in two blocks at least but under Ulysses; sequence parallelism cuts
    those of a rank again; and a GPU's FP8 products want a multiple.
    """
    parallel = config.parallel
    blocks = 2 if parallel.cp > 1 and parallel.cp_kind != "ulysses" else 1
    pieces = parallel.tp if parallel.sequence_parallel else 1
    return parallel.cp * lcm(blocks, pieces, _fp8_multiple(config))


def stream_tokens(config: Config) -> int:
    """Tokens of a micro-batch that the layers work on: with `parallel.pad_tokens` more than the samples have."""
    tokens, unit = _given_tokens(config), stream_unit(config)
    return -(-tokens // unit) * unit if config.parallel.pad_tokens else tokens


def own_tokens(config: Config) -> int:
    """Those of one rank, as the layers between tensor-parallel parts have them."""
    parallel = config.parallel
    return stream_tokens(config) // parallel.cp // (parallel.tp if parallel.sequence_parallel else 1)


def check_stream(config: Config) -> Iterator[str]:
    """Complaints about the number of a micro-batch's tokens."""
    tokens, unit, parallel = _given_tokens(config), stream_unit(config), config.parallel
    if parallel.pad_tokens or tokens % unit == 0:
        return
    wants = [f"cp={parallel.cp}"] if parallel.cp > 1 else []
    wants += [f"sequence_parallel over tp={parallel.tp}"] if parallel.sequence_parallel and parallel.tp > 1 else []
    wants += ["FP8 on a GPU"] if _fp8_multiple(config) > 1 else []
    legal = near(config.batch.seq_len, unit // gcd(unit, config.batch.micro_batch_size))
    yield (
        f"batch.seq_len: micro_batch_size x seq_len = {tokens} tokens are not divisible by {unit}, as "
        f"{' and '.join(wants)} {'wants' if len(wants) == 1 else 'want'}; use seq_len={or_(legal)}, or "
        "parallel.pad_tokens=true"
    )


def _given_tokens(config: Config) -> int:
    return config.batch.micro_batch_size * config.batch.seq_len


def _fp8_multiple(config: Config) -> int:
    fp8 = config.precision.fp8
    return 1 if fp8 is None or fp8.backend == "emulate" else FP8_MULTIPLE[fp8.recipe]
