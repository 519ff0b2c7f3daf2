"""Parallel text: readers, tokenizers, buckets and batches."""
