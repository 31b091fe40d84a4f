"""Checks of a run's inputs and of the machine, before anything is created."""
