"""Replaces the package from which SGLang imports its rotary-embedding kernel without CUDA."""
