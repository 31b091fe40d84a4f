"""Runs of the tiny recipe whose processes are killed and stopped at random moments, and what must hold after each."""
