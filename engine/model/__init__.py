"""The model architecture, its tokenizer, low-rank adapters and the transformers checkpoint format."""
