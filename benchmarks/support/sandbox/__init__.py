"""Setups and measurements of the sandbox benchmark."""
