"""The learner: minibatches, training steps, checkpoints. `python -m asterism.engine.learner`, or torchrun for several ranks."""
