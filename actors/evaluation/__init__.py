"""Evaluations of a run and of `asterism eval`: their answers and results."""
