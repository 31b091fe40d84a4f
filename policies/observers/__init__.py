"""Observers of deciders that write structured log lines."""
