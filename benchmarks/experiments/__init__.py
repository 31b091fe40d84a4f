"""Experiments in miniature: one command and one picture each (docs/experiments.md)."""
