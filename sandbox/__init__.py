"""Runs a model's code and grades its answers in isolation from the machine."""
