"""The result of `asterism log fork`: the original and its branches, as `--json` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from actors.replay.branch_runner import EndedTrajectory
from actors.replay.trajectory_replay import ReplayedTrajectory
from analysis.what_if.trajectory_diff import TrajectoryComparison, TrajectoryOutcome, build_outcome, compare
from configs.run_folder import RunFolder
from policies.dialogue.chat_format import TextTokenizer
from policies.rollout.trajectory import Trajectory


class ForkPoint(NamedTuple):
    """The state in which the branches leave the original."""

    original: ReplayedTrajectory
    turn: int
    start: Trajectory
    tool_result: str | None

    def list_versions(self) -> tuple[int, ...]:
        """Policy versions that generated the original from the turn on, in order."""
        record = self.original.final.record
        generated = np.frombuffer(record.loss_mask, np.uint8).astype(np.bool_)
        generated[: self.original.turn_starts[self.turn].record.num_tokens] = False
        return tuple(dict.fromkeys(np.frombuffer(record.versions, np.int32)[generated].tolist()))


class Branch(msgspec.Struct, frozen=True):
    outcome: TrajectoryOutcome
    comparison: TrajectoryComparison = msgspec.field(name="beside_original")


class ForkResult(msgspec.Struct, frozen=True):
    run: str
    trajectory: int
    turn: int
    problem: str
    ground_truth: str
    temperature: float
    checkpoint: str
    original_versions: tuple[int, ...]  # of the original's tokens from the turn on
    tool_result: str | None  # replaces the output of the last call
    original: TrajectoryOutcome
    branches: tuple[Branch, ...]


def build_fork_result(
    folder: RunFolder, point: ForkPoint, checkpoint: Path, tokenizer: TextTokenizer, ended: Sequence[EndedTrajectory]
) -> ForkResult:
    original, final, turn = point.original, point.original.final, point.turn
    position = original.turn_starts[turn].record.num_tokens
    return ForkResult(
        run=str(folder.path),
        trajectory=final.trajectory_id,
        turn=turn,
        problem=final.group.problem,
        ground_truth=final.group.ground_truth,
        temperature=final.group.temperature,
        checkpoint=str(checkpoint),
        original_versions=point.list_versions(),
        tool_result=point.tool_result,
        original=build_outcome(tokenizer, final, original.end),
        branches=tuple(
            Branch(
                build_outcome(tokenizer, each.trajectory, each.end),
                compare(final.record, each.trajectory.record, position),
            )
            for each in ended
        ),
    )
