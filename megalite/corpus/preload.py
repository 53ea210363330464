"""What the workers of this machine share: loaded once, in the process that they are forked from.

    this process ----> forked from: libraries, stations, tables ----> worker 0, worker 1, ...

Loading takes more than a second of a core, and every worker would do it for itself. Nothing here may start a thread,
for the locks of threads do not survive a fork; those of OpenBLAS and jemalloc, which begin with the import, see to it
themselves. So files are read and tokenizers are loaded by the workers.
"""

from __future__ import annotations

import pyarrow.compute
import pyarrow.parquet  # noqa: F401

import megalite.corpus.near.station
import megalite.corpus.rules.apply
import megalite.corpus.spans.substring
import megalite.corpus.stations.clean
import megalite.corpus.stations.dedup
import megalite.corpus.stations.tokenize  # noqa: F401
from megalite.corpus.blanks import squeeze
from megalite.corpus.repair.normal_form import mark_table
from megalite.corpus.rules.characters import character_classes
from megalite.texts import Texts

mark_table()
character_classes()
squeeze(Texts.of([" "]))  # a kernel: numba makes its own tables with the first
