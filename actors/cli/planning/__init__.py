"""Estimates, before a run, of what it needs and how long it takes."""
