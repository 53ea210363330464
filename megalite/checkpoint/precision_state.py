"""What a stage remembers besides weights and moments: small tensors of its precision, such as FP8's maxima, and of its
routers.

They have names that no layout changes and are equal on all tp and dp ranks of a stage, so one rank of each stage writes
them, whole, and any layout reads them. A checkpoint that has none, of a run in bf16, is read as well: what is missing
starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megalite.architecture.weights import Rectangle
from megalite.checkpoint.reader import CheckpointReader
from megalite.engine.parts import Part
from megalite.engine.protocol import Engine
from megalite.parallel.axes import Axes


def precision_parts(engine: Engine, axes: Axes) -> Iterator[Part]:
    """What this rank writes."""
    if axes.tp.rank or axes.replicas.rank:
        return
    stage = engine.stage
    for full_name, tensor in {**stage.precision.state(), **stage.routers.state()}.items():
        kind, _, name = full_name.partition("/")
        yield Part(name, Rectangle((0,) * tensor.dim(), tuple(tensor.shape)), {kind: tensor}, is_live=False)


def load_state(engine: Engine, reader: CheckpointReader | None) -> list[str]:
    """Let a stage take up what a checkpoint has for it, or begin anew without one; returns what was not there."""
    engine.stage.routers.load(lambda name: _read(reader, name))
    return engine.stage.precision.load(lambda name: _read(reader, name))


def _read(reader: CheckpointReader | None, name: str) -> Tensor | None:
    if reader is None or name not in reader.manifest.tensors:
        return None
    shape = reader.manifest.tensors[name].shape
    return reader.read(name, Rectangle((0,) * len(shape), shape))
