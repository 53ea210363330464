"""Imported last by a server that forks processes: what was imported until then is no garbage, and a process that looked
through it for some would copy all of it."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
