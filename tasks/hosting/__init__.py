"""Runs tools, environments, dialogues and reward functions of tasks in processes of their own."""
