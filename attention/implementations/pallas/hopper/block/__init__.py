"""A block of the grid: its memory, and what it loads and visits."""
