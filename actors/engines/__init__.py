"""Builds the inference engine of a generator from the run's configuration."""
