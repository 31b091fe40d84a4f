"""Low-rank adapters (LoRA) of the learner: models with adapters, merged weights, and files in the format of peft."""
