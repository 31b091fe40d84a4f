"""Builds the container image of the sandbox."""
