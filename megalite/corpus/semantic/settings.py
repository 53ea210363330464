"""Settings of embeddings, and of the documents that go because another one means about the same."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megalite.config.schema import Section


class EmbedConfig(Section):
    """How a model makes one vector of a document."""

    pooling: Literal["mean", "last", "first"] = "mean"
    """Of the hidden states of a document's tokens: their mean, that of the last token (as SemDeDup did), or that of the
    first (encoders that were trained so). A sentence encoder's own is compared with it."""
    layer: int = -1
    """Whose hidden states: 0 is the table of embeddings, 1 the first block, -1 the last, behind the final norm."""
    max_tokens: PositiveInt | None = None
    """Tokens of a document that are read; longer ones are cut there, and counted. null reads 512, or as many as the
    model has positions for."""
    batch_tokens: PositiveInt = 16_384
    """Tokens that the model reads at once, padding among them. It bounds memory, and moves the last bits."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which the model computes."""
    stored_dtype: Literal["fp32", "fp16"] = "fp32"
    """Number format of the file. fp16 halves it, and moves similarities by some 1e-5."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model computes. With cuda each worker puts a copy of it onto a GPU: have one worker a GPU."""


class SemanticDedupConfig(Section):
    """When two documents mean about the same, and which one stays."""

    clusters: PositiveInt | None = None
    """Clusters of k-means; only documents of one cluster are compared. Pairs take documents^2 / clusters products,
    k-means documents x clusters. null takes the root of the number of documents. More clusters are quicker, and part
    more pairs; 1 compares everything."""
    threshold: float = Field(0.95, ge=-1.0, le=1.0)
    """Cosine similarity from which on two documents mean about the same. It means nothing without its model: look at
    what is removed first."""
    keep: Literal["farthest", "longest", "first"] = "farthest"
    """Who stays of documents that are near: the one farthest from the centroid of their cluster (as published), the
    longest in bytes, or the first. The earlier one wins a tie."""
    iterations: PositiveInt = Field(20, le=10_000)
    """Of k-means at most; it ends when no document changes its cluster."""
    sample_per_cluster: PositiveInt = 256
    """Documents that k-means learns the centroids from, for each cluster; all are assigned to them afterwards."""
    seed: NonNegativeInt = Field(0, lt=2**63)
    """Seed of that sample, and of the first centroids."""


class SemanticStationConfig(SemanticDedupConfig):
    """Semantic duplicates within the corpus, by the embeddings of a model of one's own."""

    model: Path
    """Folder in Hugging Face format, as `megalite convert to-hf` makes it. Nothing is downloaded."""
    embed: EmbedConfig = EmbedConfig()
    """How it makes the embeddings, which stay in `embeddings/`: another threshold does not make them anew."""
