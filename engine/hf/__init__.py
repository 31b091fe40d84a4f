"""Reads the files of a transformers folder without torch: sizes, headers of weights, tokenizer, chat format."""
