"""Multi-head attention as a pure function of its weights."""

from attention.multi_head.attention import multi_head_attention
from attention.multi_head.projections import merge_heads, split_heads

__all__ = ["merge_heads", "multi_head_attention", "split_heads"]
