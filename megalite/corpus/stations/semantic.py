"""Station: documents that mean about the same as another one (SemDeDup, Abbas et al. 2023), by their embeddings.

k-means of the embeddings                  semantic/kmeans.py
pairs within each cluster, who goes        semantic/pairs.py
write   a shard                            what stays; beside what goes: its twin, how near, and who stays for both
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megalite.corpus.corpus import Corpus
from megalite.corpus.documents import what_is_kept
from megalite.corpus.near.index import save_array
from megalite.corpus.semantic.kmeans import learn_clusters
from megalite.corpus.semantic.nearest import require_faiss
from megalite.corpus.semantic.pairs import find_semantic_duplicates, links_of
from megalite.corpus.semantic.settings import SemanticDedupConfig
from megalite.corpus.stations.embed import DOCUMENTS_NAME, VECTORS_NAME, open_embeddings
from megalite.corpus.stations.filtering import TWINS_SCHEMA, Decision, Filtering, look_up, write_names, write_shard
from megalite.errors import DataError
from megalite.progress import NoProgress, ProgressReporter
from megalite.stations.manifest import StationManifest
from megalite.stations.station import StationResult
from megalite.stations.tasks import WORK_FOLDER, Report, Runner, Task, run_tasks
from megalite.texts import Texts


def semantic_dedup(
    corpus: Corpus,
    out: Path,
    config: SemanticDedupConfig,
    *,
    embeddings: Path,
    model: Path | None = None,
    runner: Runner | None = None,
    progress: ProgressReporter | None = None,
) -> StationResult:
    """Run the station, which takes the same as a `FilterStation`, and

    Args:
        embeddings: folder that `embed` has made of the same corpus.
        model: refuse embeddings that are not of this one; None takes what they are of.

    Raises:
        DataError: the corpus is raw, the embeddings are of other documents or another model, or there are fewer
            documents than clusters.
        UnavailableError: faiss is not installed.
    """
    filtering = Filtering("semantic-dedup", corpus, runner, progress)
    require_faiss()
    made = open_embeddings(embeddings)
    _refuse_others(made, corpus, model)
    sized = with_clusters(config, made.counts["documents"])

    def build(folder: Path) -> dict[str, Any]:
        vectors, lengths = (embeddings / VECTORS_NAME).absolute(), (folder / WORK_FOLDER / "lengths.npy").absolute()
        tasks: list[Task] = [{"path": path} for path in filtering.paths]
        run_tasks(folder, "names", name_shard, tasks, runner=filtering.where["runner"], progress=NoProgress())
        starts = _starts(filtering.paths)
        save_array(lengths, pq.read_table(embeddings / DOCUMENTS_NAME, columns=["text_bytes"]).column(0).to_numpy())
        where: dict[str, Any] = {**filtering.where, "text_mb": corpus.text_mb}
        learnt = learn_clusters(folder, vectors, sized, **where)
        found = find_semantic_duplicates(folder, vectors, lengths, sized, **where)
        counts = filtering.write(folder, keep_shard, starts=starts.tolist())
        examples = [_ids(folder, starts, rows) for rows in found.pop("example_rows")]
        kmeans = {"kmeans_clusters": sized.clusters, **{f"kmeans_{name}": each for name, each in learnt.items()}}
        return {**counts, **found, "examples": examples, **kmeans}

    return filtering.run(
        out,
        build,
        settings=sized.model_dump(mode="json"),
        num_passes=3,
        inputs=[(embeddings, made.fingerprint)],
        summary=lambda counts: f"{what_is_kept(counts)}, {counts['clusters']:,} groups",
    )


def with_clusters(config: SemanticDedupConfig, num_documents: int) -> SemanticDedupConfig:
    """The settings with the number of clusters filled in.

    Raises:
        DataError: there are more clusters than documents.
    """
    if config.clusters is None:
        return config.model_copy(update={"clusters": max(1, math.isqrt(num_documents))})
    if config.clusters > num_documents:
        raise DataError(
            f"clusters={config.clusters:,}, and there are {num_documents:,} documents; use fewer, or null for "
            f"{max(1, math.isqrt(num_documents)):,}"
        )
    return config


def name_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: note the names of a shard's documents."""
    names = pq.read_table(task["path"], columns=["id", "source"], use_threads=False).to_batches()
    write_names(_names_file(folder, number), names)
    return {}


def keep_shard(task: Task, number: int, folder: Path) -> Report:
    """Task: write the documents of a shard that stay, and beside those that do not whom they are near."""
    starts = np.array(task["starts"])
    links = links_of(folder, starts[number], starts[number + 1])

    def decide(documents: pa.RecordBatch, texts: Texts, row: int) -> Decision:
        begin, end = np.searchsorted(links["row"] - starts[number], [row, row + len(texts)])
        own = links[begin:end]
        gone = own["row"] - starts[number] - row
        keep = np.ones(len(texts), bool)
        keep[gone] = False
        details = [""] * len(texts)
        twins = _names(folder, starts, own["twin"]).column("id").to_pylist()
        for place, similarity, twin in zip(gone.tolist(), own["similarity"].tolist(), twins, strict=True):
            details[place] = f"similarity {similarity:.6f} to {twin}"
        kept = _names(folder, starts, own["kept"])
        nobody = pa.Table.from_pylist([{"id": "", "source": ""}], schema=kept.schema)
        places = np.full(len(texts), len(kept))
        places[gone] = np.arange(len(kept))
        stays = pa.concat_tables([kept, nobody]).take(pa.array(places))
        return Decision(keep, "semantic duplicate", details=details, twins=stays)

    return write_shard(task["path"], number, folder, decide, schema=TWINS_SCHEMA)


def _refuse_others(made: StationManifest, corpus: Corpus, model: Path | None) -> None:
    """Embeddings of another model, or of other documents."""
    if model is not None:
        from megalite.checkpoint.hf.encoder_files import read_encoder

        facts, about = read_encoder(model), made.settings
        for what, found in (("model", facts.fingerprint), ("tokenizer", facts.tokenizer_fingerprint)):
            if about[what]["fingerprint"] != found:
                raise DataError(
                    f"{made.folder}: made with another {what} than that of {model}; run `megalite embed {model}` over "
                    "these documents, and give the folder that it makes"
                )
    *read, _ = (each.fingerprint for each in made.inputs)
    if read != [fingerprint for _, fingerprint in corpus.inputs]:
        where = ", ".join(str(path) for path, _ in corpus.inputs)
        raise DataError(
            f"{made.folder}: embeddings of other documents than those of {where}, or of what was there before; run "
            "`megalite embed` over these, and give the folder that it makes"
        )


def _starts(paths: list[str]) -> np.ndarray:
    """The row of the first document of each shard, and of none behind the last."""
    return np.cumsum([0, *(pq.read_metadata(path).num_rows for path in paths)])


def _ids(folder: Path, starts: np.ndarray, rows: list[int]) -> list[str]:
    return _names(folder, starts, np.array(rows)).column("id").to_pylist()


def _names(folder: Path, starts: np.ndarray, rows: np.ndarray) -> pa.Table:
    """Ids and sources of documents by their rows, in the order asked for."""
    shards = np.searchsorted(starts, rows, side="right") - 1
    return look_up(shards, rows - starts[shards], lambda shard: _names_file(folder, shard))


def _names_file(folder: Path, number: int) -> Path:
    return folder / WORK_FOLDER / "names" / f"{number:05d}.arrow"
