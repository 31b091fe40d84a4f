"""Drives one trajectory without a run: a conversation with a model, or the play of a script."""
