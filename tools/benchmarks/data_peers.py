"""Other tools doing the work of the data stations, as cases of the benchmark (`data_measure.py`).

Each does what its documentation shows, on the same documents and with the same settings as ours where it has them, in
one thread. None of them is needed; `data.py` says which are not installed. Where a tool has no command for the whole
job (rensa, datasketch), the few lines that users write around it are written here, and counted.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from data_cases import MICRO_BATCH_SIZE, NUM_EPOCHS, judge_clusters
from data_exact_peers import EXACT_PEERS
from data_inputs import Inputs
from data_measure import Outcome, Run, SetUp

NUM_HASHES = 256
BANDS = 32
ROWS = 8
NGRAM_WORDS = 5
THRESHOLD = 0.7
"""Of near-duplicates, as ours."""

NO_WORD = re.compile(r"\W+")

NUM_OPEN_SEQUENCES = 64
"""Sequences that first-fit keeps open, as grain's packing does."""

TEXTS_AT_ONCE = 1000


def datatrove_rules(inputs: Inputs, setting: str) -> Run:
    """datatrove's filters one after the other; a document that one refuses does not reach the next. Its words are those
    of spaCy, punctuation too, so on a corpus with program text the first filter refuses much and spares the rest."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    chain = [
        *([filters.GopherRepetitionFilter()] if setting == "repetition" else []),
        filters.GopherQualityFilter(),
        filters.C4QualityFilter(filter_no_terminal_punct=False),
        filters.FineWebQualityFilter(),
    ]

    def keeps(document: Document) -> bool:
        try:
            return all(step.filter(document) is True for step in chain)
        except ZeroDivisionError:  # a document without words
            return False

    def run(_: Path) -> Outcome:
        documents = map(Document, inputs.column("text"), inputs.column("id"))
        return Outcome(inputs.megabytes, {"kept": sum(map(keeps, documents))})

    return run


def shingles(text: str) -> list[str]:
    """Runs of five words, the text as one where it is shorter."""
    words = NO_WORD.sub(" ", text.lower()).split()
    return [" ".join(words[n : n + NGRAM_WORDS]) for n in range(max(1, len(words) - NGRAM_WORDS + 1))]


class Clusters:
    """Union-find over documents by number."""

    def __init__(self, num_documents: int):
        self._parent = list(range(num_documents))

    def join(self, one: int, other: int) -> None:
        """Put two documents into one cluster."""
        first, last = sorted((self._root(one), self._root(other)))
        self._parent[last] = first

    def outcome(self, inputs: Inputs) -> Outcome:
        """How many go, and how well chosen they are."""
        roots = [self._root(number) for number in range(len(self._parent))]
        removed = sum(root != number for number, root in enumerate(roots))
        joined = {root for number, root in enumerate(roots) if root != number}

        def judge() -> dict[str, float]:
            pairs = zip(inputs.column("id"), roots, strict=True)
            return judge_clusters(inputs, {id: root for id, root in pairs if root in joined})

        return Outcome(inputs.megabytes, {"removed": removed}, judge)

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number


def datasketch_near(inputs: Inputs, setting: str) -> Run:
    """MinHashLSH: each document is looked up, then added."""
    from datasketch import MinHash, MinHashLSH

    def run(_: Path) -> Outcome:
        texts = inputs.column("text")
        index = MinHashLSH(num_perm=NUM_HASHES, params=(BANDS, ROWS))
        clusters = Clusters(len(texts))
        for number, text in enumerate(texts):
            signature = MinHash(num_perm=NUM_HASHES)
            signature.update_batch([shingle.encode() for shingle in shingles(text)])
            for other in index.query(signature):
                clusters.join(number, other)
            index.insert(number, signature)
        return clusters.outcome(inputs)

    return run


def rensa_near(inputs: Inputs, setting: str) -> Run:
    """RMinHashLSH: each document is looked up, then added."""
    import rensa

    def run(_: Path) -> Outcome:
        texts = inputs.column("text")
        index = rensa.RMinHashLSH(threshold=THRESHOLD, num_perm=NUM_HASHES, num_bands=BANDS)
        clusters = Clusters(len(texts))
        for number, text in enumerate(texts):
            signature = rensa.RMinHash(num_perm=NUM_HASHES, seed=0)
            signature.update(shingles(text))
            for other in index.query(signature):
                clusters.join(number, other)
            index.insert(number, signature)
        return clusters.outcome(inputs)

    return run


def text_dedup_near(inputs: Inputs, setting: str) -> Run:
    """text-dedup's signatures and tables, without the copies of the data set that its command makes around them."""
    from text_dedup.minhash import embed_func
    from text_dedup.utils import xxh3_32hash

    prime, largest = np.uint64((1 << 61) - 1), np.uint32((1 << 32) - 1)
    rng = np.random.RandomState(42)
    factors = tuple(rng.randint(low, prime, size=NUM_HASHES, dtype=np.uint64) for low in (1, 0))
    settings = {
        "num_perm": NUM_HASHES,
        "ngram_size": NGRAM_WORDS,
        "min_length": 1,
        "hashranges": [(band * ROWS, (band + 1) * ROWS) for band in range(BANDS)],
        "permutations": factors,
        "hash_func": xxh3_32hash,
        "dtype": np.uint64,
        "max_hash": largest,
        "modulo_prime": prime,
    }

    def run(_: Path) -> Outcome:
        texts = inputs.column("text")
        clusters = Clusters(len(texts))
        tables: list[dict[bytes, int]] = [{} for _ in range(BANDS)]
        for number, text in enumerate(texts):
            bands = embed_func(text, number, **settings)["__signatures__"]
            for table, key in zip(tables, bands, strict=True):
                clusters.join(table.setdefault(key, number), number)
        return clusters.outcome(inputs)

    return run


def _to_file(inputs: Inputs, encode: Callable[[list[str]], np.ndarray]) -> Run:
    """Read texts, encode them, write their tokens to a file as uint16."""

    def run(out: Path) -> Outcome:
        texts, num_tokens = inputs.column("text"), 0
        with open(out / "tokens.bin", "wb") as file:
            for first in range(0, len(texts), TEXTS_AT_ONCE):
                tokens = encode(texts[first : first + TEXTS_AT_ONCE])
                tokens.tofile(file)
                num_tokens += tokens.size
        return Outcome(inputs.megabytes, {"tokens": num_tokens})

    return run


def tokenizers_encode(inputs: Inputs, setting: str) -> Run:
    """Hugging Face's tokenizers. Setting: kind of tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(inputs.tokenizer(setting) / "tokenizer.json"))
    return _to_file(inputs, lambda texts: _join(row.ids for row in tokenizer.encode_batch_fast(texts)))


def sentencepiece_encode(inputs: Inputs, setting: str) -> Run:
    """sentencepiece itself. Setting: kind of tokenizer."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(inputs.tokenizer(setting) / "tokenizer.model"))
    return _to_file(inputs, lambda texts: _join(processor.encode(texts, num_threads=1)))


def gigatoken_encode(inputs: Inputs, setting: str) -> Run:
    """gigatoken itself. Setting: kind of tokenizer."""
    import awkward
    import gigatoken

    content = json.loads((inputs.tokenizer(setting) / "tokenizer.json").read_text(encoding="utf-8"))
    (content["pre_tokenizer"],) = content["pre_tokenizer"]["pretokenizers"]  # it knows the step, not a sequence of one
    tokenizer = gigatoken.Tokenizer.from_json(json.dumps(content))

    def encode(texts: list[str]) -> np.ndarray:
        rows = tokenizer.encode_batch(texts, parallel=False)
        return awkward.to_numpy(awkward.flatten(rows)).astype(np.uint16)

    return _to_file(inputs, encode)


def _join(rows: Iterable[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), np.uint16)


def _stream(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, mapped, and the borders of the documents."""
    from megalite.data.sources import TOKENS_NAME, open_tokens

    tokens = open_tokens(inputs.tokens).tokens
    stream = np.memmap(inputs.tokens / f"{TOKENS_NAME}.bin", tokens.dtype, mode="r")
    return stream, tokens.document_starts(0, tokens.num_documents + 1)


def trl_pack(inputs: Inputs, setting: str) -> Run:
    """trl's bfd_split over the whole set at once; it gathers the tokens. Setting: seq_len."""
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    stream, borders = _stream(inputs)
    values = pa.array(np.asarray(stream))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(borders), values)})
    seq_len = int(setting)

    def run(_: Path) -> Outcome:
        packed = _pack_bfd(table, seq_len, on_seq_length_overflow="split")
        return _packing(packed.num_rows, borders, seq_len)

    return run


def first_fit_pack(inputs: Inputs, setting: str) -> Run:
    """First-fit in plain Python: long documents are cut, and a piece goes into the first open sequence with room.
    Setting: seq_len."""
    _, borders = _stream(inputs)
    seq_len = int(setting)

    def run(_: Path) -> Outcome:
        free: deque[int] = deque()
        num_sequences = 0
        for length in np.diff(borders).tolist():
            for begin in range(0, length, seq_len):
                size = min(seq_len, length - begin)
                place = next((number for number, room in enumerate(free) if room >= size), None)
                if place is not None:
                    free[place] -= size
                    continue
                if len(free) == NUM_OPEN_SEQUENCES:
                    free.popleft()
                free.append(seq_len - size)
                num_sequences += 1
        return _packing(num_sequences, borders, seq_len)

    return run


def _packing(num_sequences: int, borders: np.ndarray, seq_len: int) -> Outcome:
    num_tokens = int(borders[-1])
    padding = 100 * (1 - num_tokens / (num_sequences * seq_len))
    split = 100 * float((np.diff(borders) > seq_len).mean())
    return Outcome(num_tokens / 1e6, {"padding_percent": padding, "split_percent": split})


def memmap_load(inputs: Inputs, setting: str) -> Run:
    """A gather by hand: shuffled windows of the stream, stacked, as tokens and labels. Setting: seq_len."""
    stream, _ = _stream(inputs)
    seq_len = int(setting)
    num_samples = (stream.size - 1) // seq_len

    def run(_: Path) -> Outcome:
        num_tokens = 0
        for epoch in range(NUM_EPOCHS):
            order = np.random.default_rng(epoch).permutation(num_samples)
            for first in range(0, num_samples, MICRO_BATCH_SIZE):
                chosen = order[first : first + MICRO_BATCH_SIZE] * seq_len
                windows = np.stack([stream[begin : begin + seq_len + 1] for begin in chosen]).astype(np.int64)
                tokens, _labels = windows[:, :-1], windows[:, 1:]
                num_tokens += tokens.size
        return Outcome(num_tokens / 1e6)

    return run


def megatron_load(inputs: Inputs, setting: str) -> Run:
    """Megatron-core's GPTDataset over the same pair of files, micro-batches stacked by torch. Setting: seq_len."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from megalite.data.sources import TOKENS_NAME

    seq_len, prefix = int(setting), str(inputs.tokens / TOKENS_NAME)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_len,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=tempfile.mkdtemp(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=1, pad=0, vocab_size=1 << 16, unique_identifiers={}),
    )
    stream = IndexedDataset(prefix)
    num_samples = NUM_EPOCHS * int(stream.sequence_lengths.sum(dtype=np.int64)) // seq_len
    documents = np.arange(len(stream.document_indices) - 1, dtype=np.int32)
    samples = GPTDataset(stream, prefix, documents, num_samples, Split.train, config)

    def run(_: Path) -> Outcome:
        num_tokens = 0
        for first in range(0, num_samples, MICRO_BATCH_SIZE):
            rows = [samples[index] for index in range(first, min(first + MICRO_BATCH_SIZE, num_samples))]
            batch = {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "labels", "loss_mask")}
            num_tokens += batch["tokens"].numel()
        return Outcome(num_tokens / 1e6)

    return run


PEERS: dict[str, SetUp] = {
    "datatrove": datatrove_rules,
    **EXACT_PEERS,
    "datasketch": datasketch_near,
    "rensa": rensa_near,
    "text-dedup": text_dedup_near,
    "tokenizers": tokenizers_encode,
    "sentencepiece": sentencepiece_encode,
    "gigatoken": gigatoken_encode,
    "trl": trl_pack,
    "first-fit": first_fit_pack,
    "memmap": memmap_load,
    "megatron": megatron_load,
}
