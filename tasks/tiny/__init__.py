"""The demo: arithmetic questions that the model answers by running Python, and the program that prepares its run."""
