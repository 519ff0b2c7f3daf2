"""Figures of attention weights and metrics, and the fonts for their labels."""
