"""Sections of benchmarks.gpu. Each one returns figures by name and fits a process of its own."""
