"""Evaluations of a run and of `asterism eval` have their answers and results here."""
