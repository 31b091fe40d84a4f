"""Sections of benchmarks.gpu. Each section returns figures by name and can run in its own process."""
