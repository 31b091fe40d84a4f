"""Reads a run's logs and metrics: curves, tables, comparisons, simulations."""
