"""Generators build their inference engine here from the run's configuration."""
