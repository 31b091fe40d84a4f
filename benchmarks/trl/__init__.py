"""Runs TRL in its own environment, on the task and checkpoint of a run."""
