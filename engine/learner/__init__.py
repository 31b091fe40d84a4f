"""The learner: minibatches, training steps, checkpoints. `python -m engine.learner`, or torchrun for several ranks."""
