"""The learner: minibatches, training steps, checkpoints. torchrun starts `asterism.engine.learner` on several ranks."""
