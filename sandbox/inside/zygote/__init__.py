"""The warmed-up process that forks once per call."""
