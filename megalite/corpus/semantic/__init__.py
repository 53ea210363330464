"""Semantic duplicates: documents whose embeddings are near (SemDeDup, Abbas et al. 2023)."""
