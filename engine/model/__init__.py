"""The layers of a model, low-rank adapters, and models loaded from transformers folders."""
