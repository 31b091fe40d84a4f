"""Attention and matrix products of the embedded engine, and their batch invariance."""
