"""Micro batches of equal cost on all ranks, and how fast the ranks train on them."""
