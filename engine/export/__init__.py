"""The files with which other programs use a trained model: tokenizer, chat template, generation config, weights."""
