"""Benchmark programs. Each prints its figures as one JSON line at the end."""
