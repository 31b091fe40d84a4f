"""The losses of SFT and GRPO."""
