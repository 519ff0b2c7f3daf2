"""Ring attention: `attend` for a sequence sharded over several devices."""

from attention.ring.attention import ring_attention
from attention.ring.order import arrange, restore, ring_positions

__all__ = ["arrange", "restore", "ring_attention", "ring_positions"]
