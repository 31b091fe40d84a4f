"""Reward functions of the user, which run in separate processes."""
