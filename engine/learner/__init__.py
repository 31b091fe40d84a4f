"""The learner: minibatches, training steps, checkpoints. Started by torchrun -m engine.learner."""
