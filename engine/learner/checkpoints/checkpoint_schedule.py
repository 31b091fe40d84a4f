"""Decides when the learner saves a checkpoint, and which checkpoints have an export."""

import time
from collections.abc import Callable

from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.distributed import RankGroup, broadcast_object

SFT_SAVE_EVERY = 100  # a killed learner repeats at most this many steps of the cold start


class CheckpointSchedule:
    """The schedule of one rank. All ranks make the same calls. The leading rank's clock decides for all ranks."""

    def __init__(self, run: RunConfig, ranks: RankGroup, read_clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._ranks = ranks
        self._read_clock = read_clock
        self._last_saved_at = read_clock()

    def on_saved(self) -> None:
        self._last_saved_at = self._read_clock()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint follows an RL step."""
        return (
            self._is_export_requested(step) or step % self._run.learner.checkpoints.every == 0 or self._is_time_over()
        )

    def is_due_in_cold_start(self, step: int) -> bool:
        """Return whether a checkpoint follows a step of the cold start; the last step always has a checkpoint."""
        return step < self._run.sft.steps and (step % SFT_SAVE_EVERY == 0 or self._is_time_over())

    def is_exported(self, step: int) -> bool:
        """Return whether the checkpoint of the step has a transformers model."""
        return self._run.learner.checkpoints.export_every == 0 or self._is_export_requested(step)

    def _is_export_requested(self, step: int) -> bool:
        """Return whether the step's export is requested. Step 0, the last step and evaluated steps always have one."""
        every, is_evaluated = self._run.learner.checkpoints.export_every, self._run.evaluation.is_saved(step)
        return step in (0, self._run.rl.steps) or is_evaluated or (every > 0 and step % every == 0)

    def _is_time_over(self) -> bool:
        limit_s = 60 * self._run.learner.checkpoints.minutes
        return limit_s > 0 and broadcast_object(self._ranks, self._read_clock() - self._last_saved_at >= limit_s)
