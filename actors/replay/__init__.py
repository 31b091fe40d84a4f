"""Replay decides again on the events in a run's logs."""
