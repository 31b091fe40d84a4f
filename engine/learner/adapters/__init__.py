"""Low-rank adapters (LoRA) of the learner: models with adapters, and the merged weights for engines."""
