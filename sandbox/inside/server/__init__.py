"""The fork server: forks a process per call, enforces limits, kills and removes leftovers."""
