"""Parallel text: downloads, readers, tokenizers and bucketed batches."""
