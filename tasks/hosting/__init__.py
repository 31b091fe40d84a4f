"""Runs tools, environments, dialogues and reward functions of tasks in separate processes."""
