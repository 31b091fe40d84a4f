"""The files of an exported model: weights, configuration, tokenizer and chat template, as transformers folders."""
