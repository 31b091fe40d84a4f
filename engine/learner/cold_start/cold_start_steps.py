"""The steps of the cold start on one rank, their metrics, and the validation loss."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.load_metrics import compute_speed_metrics, measure_peak_memory, reset_peak_memory
from asterism.engine.learner.batches.training_sequence import SequenceSource
from asterism.engine.learner.cold_start.dialogue_set import DialogueSet
from asterism.engine.learner.distributed import RankGroup, all_reduce
from asterism.engine.learner.loss_reduction import compute_file_losses, sum_by_file
from asterism.engine.learner.trainer import Trainer


class ColdStartSteps:
    """The steps of the cold start on one rank. Every rank makes the same calls."""

    def __init__(self, run: RunConfig, dialogues: DialogueSet, trainer: Trainer, ranks: RankGroup) -> None:
        """`run` contains the number of steps in sft.steps."""
        self._run = run
        self._dialogues = dialogues
        self._trainer = trainer
        self._ranks = ranks

    def run_next(self) -> dict[str, float]:
        """Run one update, and a validation if it is due. Return the metrics of the step."""
        trainer, began = self._trainer, time.monotonic()
        sequences = self._dialogues.get_batch(trainer.step)
        reset_peak_memory(self._ranks.device)
        metrics = trainer.run_sft_step(sequences)
        train_s, peak = time.monotonic() - began, self._run.learner.peak_tflops
        speed = compute_speed_metrics(sequences, trainer.flops, train_s, self._ranks.world_size, peak)
        metrics |= {"dialogues": float(len(sequences)), "tokens_per_s": speed.pop("trained_tokens_per_s"), **speed}
        metrics |= measure_peak_memory(self._ranks.device)
        if self._is_validation_due():
            metrics |= self._validate()
        return metrics

    def _is_validation_due(self) -> bool:
        """Return whether a validation follows the finished step."""
        sft, step = self._run.sft, self._trainer.step
        return bool(self._dialogues.validation) and (step % sft.validation_every == 0 or step == sft.steps)

    def _validate(self) -> dict[str, float]:
        began, sft = time.monotonic(), self._run.sft
        names = sft.file_names if sft.validation_share else ()
        losses = measure_validation_loss(self._trainer, self._dialogues.validation, names, self._ranks)
        return losses | {"validation_s": time.monotonic() - began}


def measure_validation_loss(
    trainer: Trainer, sequences: Sequence[SequenceSource], names: Sequence[str], ranks: RankGroup
) -> dict[str, float]:
    """Compute the loss per token, over all sequences and by file, without an update. Every rank calls it."""
    sums: dict[str, Tensor] = {}
    for batch, logprobs_N in trainer.score_without_update(sequences):
        added = {"loss": -logprobs_N.sum(), "tokens": torch.tensor(float(len(logprobs_N)))}
        added |= sum_by_file(batch.groups_N, logprobs_N, names)
        sums = {name: each.to("cpu", torch.float64) + sums.get(name, 0.0) for name, each in added.items()}
    reduced = all_reduce(ranks, torch.stack(list(sums.values())).to(ranks.device), ReduceOp.SUM).tolist()
    totals = dict(zip(sums, reduced, strict=True))
    return {
        "validation_loss": totals["loss"] / max(1.0, totals["tokens"]),
        "validation_tokens": totals["tokens"],
        **{f"file {name}: validation_loss": loss for name, loss in compute_file_losses(totals, names).items()},
    }
