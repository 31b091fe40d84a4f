"""The warmed-up process that forks a process for each call."""
