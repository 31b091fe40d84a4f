"""Writes checkpoints in the background: the state of training with DCP, and the exported model."""
