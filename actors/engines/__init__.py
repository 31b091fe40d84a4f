"""Inference engines of generators, and the checkpoints that commands name."""
