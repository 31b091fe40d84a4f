"""What touches weights: the model, the embedded engine, the learner, weight transfer, checkpoints."""
