"""Runs of the tiny recipe whose processes are killed, stopped and cut off at random moments, and what must hold after each."""
