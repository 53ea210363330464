"""What every rank imports, and what becomes of it: it is no garbage, and nobody looks through it for some.

Python looks for garbage as objects are made, and imports make seven hundred thousand, of which ten thousand small ones
are some: looking takes a quarter of their time (4.1 s for 3.0 on an AMD Zen 4). A rank that was forked and looked
through what it shares with the others would copy all of it.
"""

from __future__ import annotations

import gc
from importlib import import_module

IMPORTS = (
    *("megalite.engine.build", "megalite.data.gather", "megalite.train.open_run", "megalite.train.loop"),
    *("megalite.trial", "torch._dynamo"),
)
"""What every rank needs. The compiler is among it, because torch.optim asks for it."""


def import_all() -> None:
    """Import it, and keep it for good. No GPU is touched."""
    gc.disable()
    for name in IMPORTS:
        import_module(name)
    import_module("megalite.data.gather").warm_up()
    gc.freeze()
    gc.enable()
