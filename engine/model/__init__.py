"""The model architecture, its tokenizer and the transformers checkpoint format."""
