"""Writing checkpoints: the state of training with DCP, in the background, and the exported model."""
