"""Simulates a step's rollouts under a virtual clock, with the real deciders and engines modelled by their cost."""
