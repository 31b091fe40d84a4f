"""Fault injection into runs of the tiny recipe: random kills, stops and partitions, and the checks after each run."""
