"""All that ranks and commands import, for a server that forks them.

None of it is garbage: to look through it for some takes a quarter of the time of imports, and in a process that is
forked would copy all of it.
"""

from __future__ import annotations

import gc
from importlib import import_module

from numba.core import entrypoints
from numba.core.registry import cpu_target

MODULES = (
    *("deepspeed.runtime.zero.muon.muon_optimizer", "transformers", "torch.utils.tensorboard", "safetensors.torch"),
    *("megalite.engine.build", "megalite.engine.native.engine", "megalite.engine.deepspeed.engine"),
    *("megalite.data.gather", "megalite.train.loop", "megalite.train.open_run", "megalite.train.local"),
    *("megalite.report.page", "megalite.slurm.rank", "megalite.slurm.node_check", "megalite.cli.main"),
    *("megalite.trial", "rich.console", "numpy.ma"),
    *("megalite.engine.fsdp2.engine", "megalite.engine.runtime", "megalite.checkpoint.writer"),
    *("deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.superoffload.superoffload_stage3"),
)
"""The last ones are what DeepSpeed imports as it makes its first engine."""

gc.disable()
for module in MODULES:
    import_module(module)
entrypoints.init_all()
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()  # numba would import for the first kernel of each process
gc.freeze()
gc.enable()
