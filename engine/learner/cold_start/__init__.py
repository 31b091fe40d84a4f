"""The cold start on one rank: dialogues, their order, steps and validation."""
