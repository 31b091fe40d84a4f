"""Reads a run's logs and metrics: curves, tables, entropies, comparisons, what-if, simulations."""
