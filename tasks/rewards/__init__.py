"""Reward functions of the user, which run in a process of their own."""
