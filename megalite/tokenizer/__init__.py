"""Text to ids and back: training tokenizers, fast encoders that give the same ids, comparing tokenizers."""
