"""The checkpoints of a run: their folders, the best one, and a thread that writes them: DCP's state and the exported model."""
