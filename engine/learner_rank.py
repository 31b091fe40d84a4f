"""What every rank of the learner does, the same on all of them: the cold start or resuming, then one RL step at a time.

Nothing here knows the bus. Only the leading rank publishes weights and reports.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from bus.messages import ProtocolError, Row, WeightsPublished
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.batches import SftOrder, TrainingSequence, check_versions, sft_sequence
from engine.checkpoint import load_model
from engine.distributed import Ranks, from_leader, whole_parameters
from engine.journal import BatchJournal
from engine.sft_data import read_sft
from engine.snapshots import is_resumable, prune, steps_saved
from engine.tokenizer import check_vocabulary, load_tokenizer
from engine.trainer import Trainer
from engine.weights import WeightsPublisher

SFT_SAVE_EVERY = 100  # steps of the cold start that a killed learner repeats at most

Report = Callable[[int, dict[str, float]], None]  # step of the cold start, its values


class NoSuchStep(UnusableInput):
    """There is no checkpoint of the step to go on from."""


class Trained(NamedTuple):
    """The policy after a step: what the run is told about it."""

    step: int
    metrics: dict[str, float]
    published: WeightsPublished | None  # None on all ranks but the leading one, and where newer weights follow at once


class LearnerRank:
    def __init__(self, run: Run, folder: RunFolder, ranks: Ranks, journal: BatchJournal | None = None) -> None:
        """`journal` is the leading rank's; a checkpoint makes it forget."""
        self._run = run
        self._journal = journal
        self._folder = folder
        self._ranks = ranks
        self._initial = folder.expand(run.model.checkpoint)
        self._partial = folder.checkpoints / "sft_partial"
        # A step that was collected ahead is trained while engines load the weights of the steps before.
        slots = max(2, run.rl.max_staleness + 1)
        self._publisher = WeightsPublisher(folder.shared_memory, slots) if ranks.leads else None
        self._trainer: Trainer | None = None
        self._logger = structlog.get_logger()

    # ---------------------------------------------------------------- beginning

    def start(self, resume_step: int | None, report: Report, given: Sequence[int] = ()) -> Trained:
        """Go on from `resume_step`, by default from the newest complete checkpoint; without any, from the beginning.
        Where the leader was `given` batches of later steps, nothing is published before they are trained on.

        Raises UnusableInput for a checkpoint, a tokenizer or a data file that cannot be used, OSError if the disk
        refuses.
        """
        step = from_leader(self._ranks, self._step_to_resume(resume_step))
        metrics = self._begin(report) if step is None else self._resume(step)
        goes_on = from_leader(self._ranks, any(each > self._step for each in given))
        return Trained(self._step, metrics, None if goes_on else self._publish())

    def _step_to_resume(self, wanted: int | None) -> int | None:
        saved = steps_saved(self._folder.checkpoints)
        if wanted in saved or (wanted is None and saved):
            return saved[-1] if wanted is None else wanted
        if wanted:
            raise NoSuchStep(f"{self._folder.checkpoint(wanted)}: there is no checkpoint to go on from")
        return None

    def _resume(self, step: int) -> dict[str, float]:
        self._trainer = self._load(self._folder.checkpoint(step), resume=True)
        self._logger.info("training.resumed", step=step, rank=self._ranks.rank)
        return {}

    def _begin(self, report: Report) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._run.sft.steps:
            metrics = self._cold_start(report)
        else:
            self._trainer = self._load(self._initial)
        self._current.begin("rl")
        self._save(self._folder.checkpoint(0))
        if self._ranks.leads:
            shutil.rmtree(self._partial, ignore_errors=True)
        return metrics

    def _load(self, checkpoint: Path, *, resume: bool = False) -> Trainer:
        model = load_model(checkpoint)
        check_vocabulary(model.config, load_tokenizer(checkpoint))
        trainer = Trainer(model, self._run, self._ranks)
        if resume:
            trainer.load(checkpoint)
        return trainer

    # ---------------------------------------------------------------- the cold start

    def _cold_start(self, report: Report) -> dict[str, float]:
        """Returns loss (of the last step), sft_s and sft_steps, of this process alone."""
        sft, began = self._run.sft, time.monotonic()
        sequences = self._sft_sequences()
        order = SftOrder(len(sequences), sft.batch_size, self._run.seed)
        goes_on = from_leader(self._ranks, is_resumable(self._partial))
        trainer = self._trainer = self._load(self._partial if goes_on else self._initial, resume=goes_on)
        first, loss = trainer.step, 0.0
        while trainer.step < sft.steps:
            loss = self._sft_step(trainer, [sequences[index] for index in order.batch(trainer.step)], report)
            if trainer.step % SFT_SAVE_EVERY == 0 and trainer.step < sft.steps:
                self._save(self._partial)
        sft_s = time.monotonic() - began
        self._logger.info("cold_start.finished", steps=trainer.step - first, loss=loss, sft_s=sft_s)
        return {"loss": loss, "sft_s": sft_s, "sft_steps": float(trainer.step - first)}

    def _sft_sequences(self) -> list[TrainingSequence]:
        path = self._folder.expand(self._run.sft.data)
        dialogues = read_sft(path, load_tokenizer(self._initial), self._run.dialogue.tools)
        return [sft_sequence(dialogue.token_ids, dialogue.loss_mask) for dialogue in dialogues]

    def _sft_step(self, trainer: Trainer, sequences: Sequence[TrainingSequence], report: Report) -> float:
        began = time.monotonic()
        metrics = trainer.sft_step(sequences)
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        tokens_per_s = num_tokens / (time.monotonic() - began)
        if self._ranks.leads:
            report(trainer.step, {**metrics, "tokens_per_s": tokens_per_s})
        return metrics["loss"]

    # ---------------------------------------------------------------- reinforcement learning

    def train(self, step: int, rows: Sequence[Row], *, publish: bool = True) -> Trained:
        """One RL step; without rows the policy stays as it is, under a new version.

        Raises ProtocolError for any step but the next one and for tokens of versions that the step may not train on,
        ValueError for rows that do not fit the model.
        """
        if step != self._step + 1:
            raise ProtocolError(f"step {step} cannot be trained after step {self._step}")
        check_versions(rows, step, self._run.rl.max_staleness)
        began = time.monotonic()
        metrics = self._current.rl_step(rows)
        trained = time.monotonic()
        due = step % self._run.learner.checkpoint_every == 0 or step == self._run.rl.steps
        if due:
            self._save(self._folder.checkpoint(step))
            if self._journal is not None:
                self._journal.forget_up_to(step)
        saved = time.monotonic()
        published = self._publish() if publish else None
        metrics["train_s"] = trained - began
        metrics["checkpoint_s"] = saved - trained
        metrics["publish_s"] = time.monotonic() - saved
        self._logger.info("step.trained", step=step, rank=self._ranks.rank, **metrics)
        return Trained(step, metrics, published)

    def close(self) -> None:
        """Takes the published weights back."""
        if self._publisher is not None:
            self._publisher.close()

    @property
    def _current(self) -> Trainer:
        assert self._trainer is not None, "start() comes first"
        return self._trainer

    @property
    def _step(self) -> int:
        return self._current.step

    def _publish(self) -> WeightsPublished | None:
        parameters = whole_parameters(self._current.model)
        return self._publisher.publish(self._step, parameters) if self._publisher is not None else None

    def _save(self, checkpoint: Path) -> None:
        self._current.save(checkpoint, self._initial)
        if self._ranks.leads:
            stale = prune(self._folder.checkpoints, self._run.learner.keep_checkpoints)
            self._logger.info("checkpoint.saved", path=str(checkpoint), pruned=len(stale))
