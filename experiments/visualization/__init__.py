"""Figures and their fonts."""
