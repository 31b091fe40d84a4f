"""The demo's task: arithmetic questions that the model answers by running Python."""
