"""The files with which other programs chat with a trained model."""
