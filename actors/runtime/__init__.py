"""Runs inside each process of a run: receive loops, recovery, clock, wiring."""
