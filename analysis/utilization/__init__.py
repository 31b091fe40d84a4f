"""Where a run's time went, from its structured logs alone: `asterism report`. docs/report.md says which lines it reads."""
