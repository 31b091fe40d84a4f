"""One rank of the learner: cold start or resume, then one RL step at a time. All ranks make the same calls.

This module does not use the bus. Only the leading rank publishes weights and reports progress.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from asterism.bus.messages import ProtocolError, WeightsPublished
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.export.chat_files import build_checkpoint_chat
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.batches.load_metrics import compute_speed_metrics, measure_peak_memory, reset_peak_memory
from asterism.engine.learner.batches.sample_exchange import exchange_samples
from asterism.engine.learner.batches.sample_files import StoredSequence
from asterism.engine.learner.checkpoints.best_checkpoint import list_protected_steps
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    is_resumable,
    list_saved_steps,
    prune_checkpoints,
    read_trainer_state,
    restore_replaced_checkpoints,
)
from asterism.engine.learner.checkpoints.checkpoint_schedule import CheckpointSchedule
from asterism.engine.learner.cold_start.cold_start_steps import ColdStartSteps
from asterism.engine.learner.cold_start.dialogue_set import open_dialogues
from asterism.engine.learner.distributed import RankGroup, broadcast_object
from asterism.engine.learner.policy_publisher import PolicyPublisher
from asterism.engine.learner.policy_trainers import PolicyTrainers
from asterism.engine.learner.state_offload import StateOffload
from asterism.engine.learner.trainer import Trainer

SftProgressCallback = Callable[[int, dict[str, float]], None]  # step of the cold start, and its metrics


class CheckpointNotFound(UnusableInput):
    """A requested resume step without a checkpoint."""


class TrainStepResult(NamedTuple):
    """The result of a step, which the leading rank reports."""

    step: int
    metrics: dict[str, float]
    published: WeightsPublished | None  # None on other ranks, and if newer weights follow at once


class LearnerRank:
    def __init__(
        self, run: RunConfig, folder: RunFolder, ranks: RankGroup, journal: BatchJournal | None = None
    ) -> None:
        """`journal` exists on the leading rank; a checkpoint deletes the journal's batches up to its step."""
        self._run = run
        self._journal = journal
        self._folder = folder
        self._ranks = ranks
        self._trainers = PolicyTrainers(run, folder, ranks)
        self._initial_checkpoint = folder.expand_path(run.model.checkpoint)
        self._partial_sft_checkpoint = folder.partial_cold_start
        self._build_chat = cache(partial(build_checkpoint_chat, run, folder, self._initial_checkpoint))
        self._publisher = PolicyPublisher(run, folder, ranks)
        self._trainer: Trainer | None = None
        self._metrics: dict[str, float] = {}  # metrics of the last step
        self._is_last_step = False  # whether the run ends with the current step
        self._checkpoint_s = 0.0  # time spent on saves since the last result
        self._schedule = CheckpointSchedule(run, ranks)
        self._offload = StateOffload(run, ranks)
        self._logger = structlog.get_logger()

    # ---------------------------------------------------------------- start

    def start(
        self, resume_step: int | None, report: SftProgressCallback, journaled_steps: Sequence[int] = ()
    ) -> TrainStepResult:
        """Resume from `resume_step` or from the newest checkpoint, or start training if there is no checkpoint.

        If the journal has batches of later steps, the rank publishes only the weights of the last of these steps.
        Raises UnusableInput for an unusable checkpoint, tokenizer or data file, and OSError for disk errors.
        """
        self._ranks.select_device()  # the leading rank trains in a separate thread
        if self._ranks.is_leader:
            restore_replaced_checkpoints(self._folder.checkpoints)
        step = broadcast_object(self._ranks, self._choose_resume_step(resume_step))
        metrics = self._start_training(report) if step is None else self._resume_training(step)
        if self._run.learner.loss.kl_coef:
            self.finish_saving()
            self._loaded_trainer.set_reference(self._trainers.models.load_reference(self._loaded_trainer.model))
        has_later_batches = broadcast_object(self._ranks, any(each > self._step for each in journaled_steps))
        published = None if has_later_batches else self._publish_weights()[0]
        if not has_later_batches:
            self._offload.release(self._loaded_trainer.collect_state)
        return TrainStepResult(self._step, metrics, published)

    def _choose_resume_step(self, requested_step: int | None) -> int | None:
        saved = list_saved_steps(self._folder.checkpoints)
        if requested_step in saved or (requested_step is None and saved):
            return saved[-1] if requested_step is None else requested_step
        if requested_step:
            raise CheckpointNotFound(
                f"{self._folder.get_checkpoint_path(requested_step)}: no checkpoint to resume from"
            )
        return None

    def _resume_training(self, step: int) -> dict[str, float]:
        if step or not self._run.learner.resume_from:
            checkpoint = self._folder.get_checkpoint_path(step)
            self._trainer = self._trainers.resume(checkpoint)
            self._publisher.restore_prompts(read_trainer_state(checkpoint).probe)
        else:  # the checkpoint of step 0 has no moments
            self._trainer = self._trainers.continue_other_run()
        self._logger.info("training.resumed", step=step, rank=self._ranks.rank)
        return {} if self._journal is None else self._journal.read_metrics(step)

    def _start_training(self, report: SftProgressCallback) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._run.learner.resume_from:
            self._trainer = self._trainers.continue_other_run()
        elif self._run.sft.is_enabled:
            metrics = self._run_cold_start(report)
        else:
            self._trainer = self._trainers.start()
        self._loaded_trainer.check_weights()
        if not self._run.learner.resume_from:
            self._start_rl()
        self._metrics = metrics
        self._write_metrics(0)
        self._save_checkpoint(
            self._folder.get_checkpoint_path(0),
            is_exported=True,
            on_pruned=lambda: shutil.rmtree(self._partial_sft_checkpoint, ignore_errors=True),
        )
        if self._run.rl.steps == 0:  # the run ends here
            self.finish_saving()
        return metrics

    def _start_rl(self) -> None:
        trainer = self._loaded_trainer
        if self._trainers.models.needs_adapters(trainer.model):
            self.finish_saving()  # completes the cold start's checkpoint before its model is replaced
            trainer.model = self._trainers.models.add_adapters(trainer.model)
        trainer.start_stage("rl")

    # ---------------------------------------------------------------- the cold start

    def _run_cold_start(self, report: SftProgressCallback) -> dict[str, float]:
        """Run the cold start; return the last step's loss, and sft_s and sft_steps of this process."""
        began = time.monotonic()
        dialogues = open_dialogues(self._run, self._folder, self._ranks, self._initial_checkpoint)
        self._run = replace(self._run, sft=dialogues.sft)
        self._schedule = CheckpointSchedule(self._run, self._ranks)
        partial_checkpoint = self._partial_sft_checkpoint
        is_resuming = broadcast_object(self._ranks, is_resumable(partial_checkpoint))
        trainer = self._trainer = self._trainers.resume(partial_checkpoint) if is_resuming else self._trainers.start()
        steps = ColdStartSteps(self._run, dialogues, trainer, self._ranks)
        first, metrics = trainer.step, dict[str, float]()
        while trainer.step < self.num_sft_steps:
            metrics = steps.run_next()
            if self._ranks.is_leader:
                report(trainer.step, metrics)
            if self._schedule.is_due_in_cold_start(trainer.step):
                self._save_checkpoint(partial_checkpoint, is_exported=False)
        done = {"loss": metrics.get("loss", 0.0), "sft_s": time.monotonic() - began}
        self._logger.info("cold_start.finished", steps=trainer.step - first, **done)
        return {**done, "sft_steps": float(trainer.step - first)}

    @property
    def num_sft_steps(self) -> int:
        """The number of steps of the cold start; with sft.epochs, 0 until the dialogues are counted."""
        return self._run.sft.steps

    # ---------------------------------------------------------------- reinforcement learning

    def train(
        self, step: int, sequences: Sequence[StoredSequence], *, publish: bool = True, is_last: bool = False
    ) -> TrainStepResult:
        """Train one RL step. Without sequences the weights do not change, but get a new version.

        The caller then sends the result and calls save_if_due(), so that engines do not wait for the disk. The last
        step is saved before its weights are published, because the publication ends the run. Raises ProtocolError for any step
        except the next step, and the errors of Trainer.run_rl_step.
        """
        if step != self._step + 1:
            raise ProtocolError(f"step {step} cannot be trained after step {self._step}")
        self._is_last_step = is_last or step == self._run.rl.steps
        with self._ranks.operation(f"step {step}", is_limited=False):
            return self._run_rl_step(step, sequences, publish=publish)

    def _run_rl_step(self, step: int, sequences: Sequence[StoredSequence], *, publish: bool) -> TrainStepResult:
        self._offload.restore()
        self._publisher.choose_prompts(step, sequences)  # the last step's checkpoint deletes the batch
        trainer, began = self._loaded_trainer, time.monotonic()
        reset_peak_memory(self._ranks.device)
        metrics = trainer.run_rl_step(sequences, partial(exchange_samples, self._ranks))
        train_s = metrics["train_s"] = time.monotonic() - began
        peak, shared = self._run.learner.peak_tflops, trainer.shared_prompts
        metrics |= compute_speed_metrics(sequences, trainer.flops, train_s, self._ranks.world_size, peak, shared)
        metrics |= measure_peak_memory(self._ranks.device)
        self._metrics = metrics
        trainer.check_weights()  # raises an error before weights are published or saved
        if self._is_last_step:
            self._save_step(step, is_exported=True)
        published, times = self._publish_weights() if publish else (None, {"publish_s": 0.0, "probe_s": 0.0})
        # A repeated step also has these metrics, so that replayed metrics are equal.
        metrics |= {**times, "publish_bytes": float(self._publisher.get_num_bytes(trainer.model))}
        if publish:
            self._offload.release(self._loaded_trainer.collect_state)
        metrics |= self._offload.take_metrics()
        metrics["checkpoint_s"], self._checkpoint_s = self._checkpoint_s, 0.0
        self._logger.info("step.trained", step=step, rank=self._ranks.rank, **metrics)
        return TrainStepResult(step, metrics, published)

    def save_if_due(self) -> None:
        """Start to save a checkpoint of the current step if it is due. Every rank calls it after each step.

        Raises DiskError of the previous checkpoint.
        """
        if not self._is_last_step and self._schedule.is_due(self._step):
            with self._ranks.operation(f"step {self._step}", is_limited=False):
                self._save_step(self._step, is_exported=self._schedule.is_exported(self._step))

    def save_now(self) -> int:
        """Save the current step without an export, unless it is saved. Return the step. Every rank calls it."""
        self.finish_saving()
        if not broadcast_object(self._ranks, is_resumable(self._folder.get_checkpoint_path(self._step))):
            with self._ranks.operation(f"save of step {self._step}", is_limited=False):
                self._save_step(self._step, is_exported=False)
            self.finish_saving()
        return self._step

    def _save_step(self, step: int, *, is_exported: bool) -> None:
        began, journal = time.monotonic(), self._journal
        self._write_metrics(step)
        self._save_checkpoint(
            self._folder.get_checkpoint_path(step),
            is_exported=is_exported,
            on_pruned=(lambda: journal.delete_up_to(step)) if journal is not None else None,
        )
        if self._is_last_step:  # no later step would report a failed write
            self.finish_saving()
        self._checkpoint_s += time.monotonic() - began

    def _write_metrics(self, step: int) -> None:
        """Write the step's metrics into the journal: a learner that resumes from this step may have to report them."""
        if self._journal is not None:
            self._journal.write_metrics(step, self._metrics)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint has its final name. Raises DiskError."""
        if self._trainer is not None:
            self._trainer.finish_saving()

    def close(self) -> None:
        """Wait for the last checkpoint, also after an error, and remove the published weights."""
        try:
            self.finish_saving()
        except (UnusableInput, OSError, RuntimeError):
            self._logger.exception("checkpoint.failed")
        self._publisher.close()

    @property
    def _loaded_trainer(self) -> Trainer:
        assert self._trainer is not None, "call start() first"
        return self._trainer

    @property
    def _step(self) -> int:
        return self._loaded_trainer.step

    def _publish_weights(self) -> tuple[WeightsPublished | None, dict[str, float]]:
        return self._publisher.publish(self._loaded_trainer.model, self._step)

    def _save_checkpoint(
        self, checkpoint: Path, *, is_exported: bool, on_pruned: Callable[[], None] | None = None
    ) -> None:
        """Start to save. The leading rank calls `on_pruned` after it has deleted older checkpoints."""

        def prune() -> None:
            checkpoints = self._folder.checkpoints
            protected = list_protected_steps(self._run, checkpoints, list_saved_steps(checkpoints))
            stale = prune_checkpoints(checkpoints, self._run.learner.checkpoints.keep, protected)
            self._logger.info("checkpoint.saved", path=str(checkpoint), pruned=len(stale))
            if on_pruned is not None:
                on_pruned()

        source, chat, probe = self._initial_checkpoint, self._build_chat, self._publisher.prompts
        self._loaded_trainer.save(
            checkpoint, source, is_exported=is_exported, probe=probe, build_chat=chat, on_committed=prune
        )
        self._schedule.on_saved()
