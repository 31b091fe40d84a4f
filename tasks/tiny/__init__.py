"""Tokenizer and model of [tiny], and the demo's task: arithmetic questions that the model answers by running Python."""
