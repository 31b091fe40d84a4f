"""`python -m tests.engine.learner.loss_gradients LOSS MICRO_BATCH_TOKENS OUT`: the gradient of one minibatch in float64.

Runs on all ranks that torchrun starts. OUT gets the gradients and the metrics.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from engine.learner.distributed import RankGroup, gather_full, join_ranks, leave_ranks, wait_at_barrier
from engine.learner.trainer import Trainer
from tests.engine.learner.training_examples import rows, small_run, trainable_model


class GradientTrainer(Trainer):
    """Keeps the gradients of its last update."""

    gradients: dict[str, Tensor]

    def _apply_gradients(self, lr_scale: float) -> float:
        self.gradients = {
            name: gather_full(parameter.grad).clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        return super()._apply_gradients(lr_scale)


def compute_gradients(loss: str, micro_batch_tokens: int, ranks: RankGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
    torch.set_num_threads(1)
    run = small_run(loss=loss, minibatches=1, micro_batch_tokens=micro_batch_tokens)
    trainer = GradientTrainer(trainable_model().double(), run, ranks)
    trainer.start_stage("rl")
    metrics = trainer.run_rl_step(rows(0, groups=2, size=4))
    return trainer.gradients, metrics


def main(loss: str, micro_batch_tokens: str, out: str) -> None:
    ranks = join_ranks()
    gradients, metrics = compute_gradients(loss, int(micro_batch_tokens), ranks)
    if ranks.is_leader:
        torch.save((gradients, metrics), out)
    wait_at_barrier(ranks)
    leave_ranks(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
