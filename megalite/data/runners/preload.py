"""What the workers of this machine share: loaded once, in the process that they are forked from.

    this process ----> forked from: libraries, stations, tables ----> worker 0, worker 1, ...

Loading takes more than a second of a core, and every worker would do it for itself. Nothing here may start a thread,
for the locks of threads do not survive a fork; those of OpenBLAS and jemalloc, which begin with the import, see to it
themselves. So files are read and tokenizers are loaded by the workers.
"""

from __future__ import annotations

import pyarrow.compute
import pyarrow.parquet  # noqa: F401

import megalite.data.clean
import megalite.data.dedup
import megalite.data.near.station
import megalite.data.rules.judge
import megalite.data.spans.substring
import megalite.data.tokenize  # noqa: F401
from megalite.data.blanks import squeeze
from megalite.data.repair.normal_form import mark_table
from megalite.data.rules.characters import character_classes
from megalite.data.texts import Texts

mark_table()
character_classes()
squeeze(Texts.of([" "]))  # a kernel: numba makes its own tables with the first
