"""Entropy of the policy at each generated token, by kind of token."""
