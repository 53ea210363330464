"""What tests share: spawned ranks, tiny models, corpora, independent references."""
