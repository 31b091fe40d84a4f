"""The runtime of each process: receive loops, recovery, clock, wiring."""
