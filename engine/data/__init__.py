"""Data sets: problems for RL and dialogues for the cold start."""
