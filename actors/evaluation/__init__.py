"""Answers and results of evaluations, during a run and in `asterism eval`."""
