"""Measures where a run's time went, from its structured logs only: `asterism report`. See docs/report.md."""
