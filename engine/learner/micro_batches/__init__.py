"""Micro batches of equal cost on all ranks, and the metrics of their training speed."""
