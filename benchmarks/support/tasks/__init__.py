"""Environments and measurements of the benchmark of tasks."""
