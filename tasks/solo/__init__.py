"""Drives one trajectory without a run: a conversation with a model, or a scripted play."""
