"""Recomputes decisions of a finished run: other RoC filters, trajectory branches."""
