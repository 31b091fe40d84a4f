"""Judges a run's groups with other Resample-on-Correct settings."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec

from asterism.analysis.evaluation.answer_statistics import compute_mean
from asterism.bus.addresses import HEAD
from asterism.bus.event_log.reader import decode_event, read_events
from asterism.bus.messages import (
    EvaluationFinished,
    GroupJudged,
    RunStarted,
    StepCollected,
    TrainingSample,
    TrajectoryFinished,
)
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.groups.selection import SelectionRules, select_fresh_trajectories, select_rows

_KINDS = (RunStarted, TrajectoryFinished, GroupJudged, StepCollected, EvaluationFinished)


class JudgedGroup(NamedTuple):
    """A complete group, and the judgement of the buffer."""

    judged: GroupJudged
    candidates: Sequence[TrajectoryFinished]  # trajectories without a token that is too stale to train on


class CandidateTrajectory(msgspec.Struct, frozen=True):
    """A trajectory with its advantages relative to the kept trajectories, or None if not kept."""

    group_id: int
    trajectory_id: int
    task: str  # empty without [[tasks]]
    reward: float
    components: dict[str, float]  # components of the reward
    is_positive: bool  # success by the other setting
    calls: int
    calls_failed: int
    response_tokens: int
    advantage: float | None  # advantage in the run
    other_advantage: float | None


class SelectionStats(msgspec.Struct, frozen=True):
    """Statistics of the trajectories that one setting keeps."""

    groups: int
    trajectories: int
    positives: int
    failed_call_share: float | None  # failed share of the positives' calls; None: no calls
    response_tokens_mean: float | None
    reward_mean: float | None
    component_means: dict[str, float]  # means over the trajectories that have the component


class SelectionDifference(msgspec.Struct, frozen=True):
    run: SelectionStats
    other: SelectionStats
    both: int  # trajectories that both settings keep
    # Mean absolute change over the trajectories that either setting keeps; 0 counts for a trajectory not kept.
    advantage_change_mean: float | None
    advantage_change_both_mean: float | None  # mean over the trajectories that both settings keep


def read_judged_groups(run: RunConfig, folder: RunFolder) -> Iterator[tuple[int, list[JudgedGroup]]]:
    """Yield every collected step with its groups; a step that a resumed run repeated appears twice.

    A step with removed events is left out. Raises UnusableInput if there is no log, or if the run's
    settings select other trajectories than the run did.
    """
    log = folder.events / f"{HEAD}.sqlite"
    if not log.exists():
        raise UnusableInput(f"{log}: there is no event log; was the run started with log.events = false?")
    finished: defaultdict[int, list[TrajectoryFinished]] = defaultdict(list)  # trajectories by group
    groups: defaultdict[int, list[JudgedGroup]] = defaultdict(list)  # judged groups by step
    for event, decision in read_events(log, kinds=[kind.__name__ for kind in _KINDS]):
        if event.actor == "recipe" or (decision is not None and decision.is_refused):
            continue
        match decode_event(log, event).message:
            case RunStarted():
                finished.clear()
                groups.clear()
            case EvaluationFinished(first_group_id=first, totals=totals):
                for group_id in range(first, first + totals.ended):
                    finished.pop(group_id, None)
            case TrajectoryFinished() as trajectory:
                finished[trajectory.group_id].append(trajectory)
            case GroupJudged(step=step, group_id=group_id) as judged:
                fresh = select_fresh_trajectories(finished.pop(group_id, ()), step, run.rl)
                if tuple(each.trajectory_id for each in fresh) == judged.candidates:  # otherwise some ends were removed
                    groups[step].append(JudgedGroup(judged, fresh))
            case StepCollected(step=step) as collected:
                complete = groups.pop(step, [])
                if len(complete) == collected.counts.totals.groups:
                    for group in complete:
                        _check_reproduced(group, run, log)
                    yield step, complete
            case _:
                pass


def _check_reproduced(group: JudgedGroup, run: RunConfig, log: Path) -> None:
    """Compare the group's kept rows with the log. Raises UnusableInput if they differ."""
    judged, rows = group.judged, rebuild_training_rows(group, run)
    kept = tuple((row.trajectory_id, row.advantage) for row in rows)
    if kept != tuple(zip(judged.kept, judged.advantages, strict=True)):
        raise UnusableInput(
            f"{log}: group {judged.group_id} of step {judged.step} differs from the recomputed one; config.toml or the "
            "code has changed since the run. `asterism log replay --verify` shows the first difference"
        )


def rebuild_training_rows(group: JudgedGroup, run: RunConfig) -> list[TrainingSample]:
    """Build the rows that the step would train on with the settings of `run`."""
    rules = SelectionRules.from_config(run)
    return select_rows(rules, group.candidates, group.judged.seed, group.judged.task).rows


def list_candidates(group: JudgedGroup, other: RunConfig) -> list[CandidateTrajectory]:
    """List all trajectories that the step could train on, in the order of their ids."""
    ours = dict(zip(group.judged.kept, group.judged.advantages, strict=True))
    theirs = {row.trajectory_id: row.advantage for row in rebuild_training_rows(group, other)}
    return [
        CandidateTrajectory(
            group_id=group.judged.group_id,
            trajectory_id=each.trajectory_id,
            task=group.judged.task,
            reward=each.reward,
            components=each.components,
            is_positive=other.success.is_met(each.reward, each.components),
            calls=each.calls,
            calls_failed=each.calls_failed,
            response_tokens=each.record.response_tokens,
            advantage=ours.get(each.trajectory_id),
            other_advantage=theirs.get(each.trajectory_id),
        )
        for each in group.candidates
    ]


def compute_difference(trajectories: Sequence[CandidateTrajectory]) -> SelectionDifference:
    run = [each for each in trajectories if each.advantage is not None]
    other = [each for each in trajectories if each.other_advantage is not None]
    both = [each for each in run if each.other_advantage is not None]
    either = [each for each in trajectories if each.advantage is not None or each.other_advantage is not None]
    return SelectionDifference(
        run=_compute_stats(run),
        other=_compute_stats(other),
        both=len(both),
        advantage_change_mean=compute_mean([_compute_advantage_change(each) for each in either]),
        advantage_change_both_mean=compute_mean([_compute_advantage_change(each) for each in both]),
    )


def _compute_advantage_change(trajectory: CandidateTrajectory) -> float:
    return abs((trajectory.other_advantage or 0.0) - (trajectory.advantage or 0.0))


def _compute_stats(trajectories: Sequence[CandidateTrajectory]) -> SelectionStats:
    positives = [each for each in trajectories if each.is_positive]
    calls = sum(each.calls for each in positives)
    return SelectionStats(
        groups=len({each.group_id for each in trajectories}),
        trajectories=len(trajectories),
        positives=len(positives),
        failed_call_share=sum(each.calls_failed for each in positives) / calls if calls else None,
        response_tokens_mean=compute_mean([each.response_tokens for each in trajectories]),
        reward_mean=compute_mean([each.reward for each in trajectories]),
        component_means={
            name: mean(each.components[name] for each in trajectories if name in each.components)
            for name in sorted({name for each in trajectories for name in each.components})
        },
    )
