"""The cold start of a rank: its dialogues, their order, its steps and its validation."""
