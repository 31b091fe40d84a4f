"""Losses of the policy: GRPO, SFT, and the interface for others."""
