"""Contains the code that touches weights: the model, engines, the learner, weight transfer, checkpoints."""
