"""Defines the configuration of a run: schema, loading, presets, and the paths of a run's files."""
