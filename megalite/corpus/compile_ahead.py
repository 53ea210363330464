"""Compiles, beside the first stations of a recipe, the kernels of those that come later.

    worker 0      clean: repair compiles | rules: waits or reads | texts ...
    worker 1      clean: waits           |                       | texts ...
    this process  rules compiles         | tokenizer compiles    | packing compiles

Compiling takes a core half a minute in all, once after an installation or an update. One process at a time compiles
what lies in one folder, so the others would look on. Everything is compiled by being called with almost nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import megalite.data
import megalite.tokenizer.encoders
from megalite.corpus import rules
from megalite.corpus.recipe import DataRecipe
from megalite.errors import UserError
from megalite.kernel_cache import CACHE_FOLDER, is_compiled
from megalite.stations.runners.local import follow_parent, preloaded_processes

LAST_OF_ALL = {
    Path(*rules.__path__) / "statistics.py": "_measure",
    Path(*megalite.tokenizer.encoders.__path__) / "word_cache.py": "encode_words",
    Path(*megalite.data.__path__) / "best_fit.py": "group_pieces",
}
"""In each file the kernel that is compiled last of those that it needs."""


@contextmanager
def compiling_ahead(recipe: DataRecipe) -> Iterator[None]:
    """Within it, a process compiles what the recipe needs, if that was not compiled before."""
    folders = [path.parent / CACHE_FOLDER for path in LAST_OF_ALL]
    elsewhere = "NUMBA_CACHE_DIR" in os.environ or not all(os.access(path.parent, os.W_OK) for path in folders)
    if elsewhere or all(is_compiled(path, name) for path, name in LAST_OF_ALL.items()):
        yield
        return
    process = preloaded_processes().Process(target=_compile_as_child, args=(recipe,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _compile_as_child(recipe: DataRecipe) -> None:
    follow_parent()
    compile_kernels(recipe)


def compile_kernels(recipe: DataRecipe) -> None:
    """Call what the stations call, in their order. What cannot be had is left to the stations, which say so."""
    import numpy as np

    from megalite.corpus.rules.apply import apply_rules
    from megalite.data.best_fit import assign_pieces, cut_documents, group_pieces
    from megalite.texts import Texts
    from megalite.tokenizer.encoders.vocabulary import BYTE_BPE, make_pieces
    from megalite.tokenizer.encoders.word_cache import WordCacheEncoder
    from megalite.tokenizer.tokenizer import Tokenizer, token_dtype

    some = Texts.of(["some words"])
    with suppress(UserError):
        apply_rules(some, recipe.clean)
    if recipe.tokenizer.path is None:
        bytes_alone = make_pieces(BYTE_BPE, np.zeros(1 << 16, np.uint8), np.arange(256))  # all kinds have one type
        WordCacheEncoder(bytes_alone).encode_texts(some, token_dtype(recipe.tokenizer.vocab_size), 0)
    else:
        with suppress(UserError):
            Tokenizer.load(recipe.tokenizer.path).encode_texts(some, with_eos=True)
    if recipe.pack.method == "best_fit":
        _, sizes, _ = cut_documents(np.ones(1, np.int64), recipe.pack.seq_len)
        group_pieces(*assign_pieces(sizes, recipe.pack.seq_len))
