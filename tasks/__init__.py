"""Tasks: their data, prompts, tools and rewards."""
