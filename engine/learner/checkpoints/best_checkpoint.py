"""The record of the best evaluated checkpoint: `checkpoints/best.json`.

With `evaluation.every` and `evaluation.keep_best` the learner saves a checkpoint of each evaluated step. The head
writes the record after each evaluation, from the lines of metrics.jsonl, so that a resumed run has the record of its
remaining lines. The learner reads the record before it deletes checkpoints.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from asterism.configs.atomic_write import write_atomically
from asterism.configs.file_manifest import check_file
from asterism.configs.schema.run_config import RunConfig


class BestCheckpoint(msgspec.Struct, frozen=True):
    step: int
    label: str  # label of the evaluation
    reward: float  # mean over the answered questions of the first set
    evaluated_step: int  # the newest step with an evaluation


class EvaluationResult(NamedTuple):
    step: int
    label: str
    values: Mapping[str, float]  # values of the evaluation's line in metrics.jsonl


def get_best_checkpoint_path(checkpoints: Path) -> Path:
    return checkpoints / "best.json"


def read_best_checkpoint(checkpoints: Path) -> BestCheckpoint | None:
    path = get_best_checkpoint_path(checkpoints)
    check_file(path)
    return msgspec.json.decode(path.read_bytes(), type=BestCheckpoint) if path.exists() else None


class BestCheckpointFile:
    """The file with the record. Without `evaluation.every` or `keep_best`, its methods do nothing."""

    def __init__(self, run: RunConfig, checkpoints: Path) -> None:
        options = run.evaluation
        self._is_enabled = options.saves_evaluated_steps
        self._labels = tuple(f"{time}_{options.during}" for time in ("start", "step", "end"))
        self._reward = f"set {options.sets[0].name}: reward" if options.sets else "reward"
        self._checkpoints = checkpoints
        self._best: BestCheckpoint | None = None

    def restart(self, results: Iterable[EvaluationResult]) -> None:
        """Replace the record by the record of `results`. Raises OSError."""
        if self._is_enabled:
            self._best = None
            for result in results:
                self._best = self._choose(result)
            self._write()

    def add(self, result: EvaluationResult) -> None:
        """Update the record with one result. Raises OSError."""
        if self._is_enabled and (best := self._choose(result)) != self._best:
            self._best = best
            self._write()

    def _choose(self, result: EvaluationResult) -> BestCheckpoint | None:
        """Choose the better step, or the earlier of equal steps. Skip evaluations with tokens of other weights."""
        best, reward = self._best, result.values.get(self._reward)
        if result.label not in self._labels or reward is None:
            return best
        found = BestCheckpoint(result.step, result.label, reward, result.step)
        is_mixed = bool(result.values.get("other_version_tokens"))
        if best is None:
            return None if is_mixed else found
        if is_mixed or reward <= best.reward:
            return msgspec.structs.replace(best, evaluated_step=max(best.evaluated_step, result.step))
        return found

    def _write(self) -> None:
        path = get_best_checkpoint_path(self._checkpoints)
        if self._best is None:
            path.unlink(missing_ok=True)
        else:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(self._best))


def list_protected_steps(run: RunConfig, checkpoints: Path, saved_steps: Iterable[int]) -> set[int]:
    """Return the steps of the best checkpoint and of checkpoints that are not yet evaluated."""
    if not run.evaluation.saves_evaluated_steps:
        return set()
    best = read_best_checkpoint(checkpoints)
    evaluated_step = -1 if best is None else best.evaluated_step
    unevaluated = {step for step in saved_steps if run.evaluation.is_saved(step) and step > evaluated_step}
    return unevaluated if best is None else {*unevaluated, best.step}
