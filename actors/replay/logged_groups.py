"""Reads the groups of each step from the head's event log, by replaying its group buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from actors.runtime.decider_loop import REFUSED_FINGERPRINT, compute_fingerprint, encode_effects
from actors.runtime.prompts import ProblemSets
from actors.runtime.wiring import build_head_deciders
from analysis.what_if.roc_refilter import JudgedGroup
from bus.addresses import BUFFER, HEAD
from bus.event_log.reader import decode_event, read_events
from bus.event_log.records import Decision
from bus.messages import (
    AnyMessage,
    BatchReady,
    EvaluationFinished,
    ProtocolError,
    RunStarted,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
)
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from policies.decider import Send
from policies.groups.buffer_state import GroupCollection, OpenGroup
from policies.groups.group_buffer import GroupBuffer
from policies.groups.group_starter import TokenizedProblem
from policies.groups.selection import compute_keep_count, judge_group, select_fresh_trajectories

_KINDS = (
    *("RunStarted", "StepRequested", "StepCollected", "EvaluationRequested"),
    *("TrajectoryFinished", "TrajectoryFailed", "TrajectoryAborted"),
)
_PLACEHOLDER_PROBLEM = TokenizedProblem("", "", b"")  # selection does not depend on the problem


class StepGroups(NamedTuple):
    step: int
    groups: Sequence[JudgedGroup]
    batch: BatchReady  # sent to the learner


def read_step_groups(run: RunConfig, folder: RunFolder) -> Iterator[StepGroups]:
    """Every step with a batch that was sent; a step that a resumed run repeated appears twice.

    A step with missing events is left out. Raises UnusableInput if there is no log, or if the batch that was sent
    differs from the batch that the replay computes.
    """
    log = folder.events / f"{HEAD}.sqlite"
    if not log.exists():
        raise UnusableInput(f"{log}: there is no event log; was the run started with log.events = false?")
    buffer = build_head_deciders(
        run, ProblemSets([_PLACEHOLDER_PROBLEM], [_PLACEHOLDER_PROBLEM] * _count_questions(run, log))
    )["buffer"]
    assert isinstance(buffer, GroupBuffer)
    judged: dict[int, list[JudgedGroup]] = {}
    collected: StepCollected | None = None
    for event, decision in read_events(log, kinds=_KINDS):
        message = decode_event(log, event).message
        if isinstance(message, StepCollected):
            collected = message
        if event.actor != "buffer":
            continue
        if isinstance(message, RunStarted):
            judged.clear()
        candidates = _list_candidates(buffer, message)
        try:
            effects = buffer.decide(event.time, message)
        except ProtocolError:
            if decision is None or decision.effects != REFUSED_FINGERPRINT:
                _resume_at_step(run, buffer, event.time, message, collected)
            continue
        for collection, group in candidates:
            if _was_judged(run, buffer, collection, group):
                judged.setdefault(collection.step, []).append(_build_judged_group(run, collection, group))
        for batch in _list_batches(effects):
            _check_effects(log, event.seq, effects, decision)
            yield StepGroups(batch.step, judged.pop(batch.step, []), batch)


def _resume_at_step(
    run: RunConfig, buffer: GroupBuffer, now: float, message: AnyMessage, collected: StepCollected | None
) -> None:
    """Begin this step as a resumed run does, since the log lacks events of the step before.

    Not possible where steps overlap: the buffer would begin other groups than the run did.
    """
    if not isinstance(message, StepRequested) or collected is None or run.rl.max_staleness:
        return
    if collected.step == message.step - 1:
        buffer.decide(now, RunStarted(collected.step, collected.cursor))
        buffer.decide(now, message)


def _count_questions(run: RunConfig, log: Path) -> int:
    """Questions per evaluation; the test set may have fewer than the configuration asks for."""
    ends = (decode_event(log, event).message for event, _ in read_events(log, kinds=["EvaluationFinished"]))
    asked = {end.questions for end in ends if isinstance(end, EvaluationFinished)}
    return max(asked, default=run.evaluation.questions)


def _list_candidates(buffer: GroupBuffer, message: AnyMessage) -> list[tuple[GroupCollection, OpenGroup]]:
    """The groups that this event may judge: that of an ending trajectory, or the left-over ones as a step begins."""
    steps: Mapping[int, GroupCollection] = buffer.state.steps
    match message:
        case TrajectoryFinished() | TrajectoryFailed() | TrajectoryAborted():
            group_id = message.group_id
            return [(each, each.open_groups[group_id]) for each in steps.values() if group_id in each.open_groups]
        case StepRequested(step=step) if step in steps:
            return [(steps[step], group) for group in steps[step].open_groups.values() if group.is_complete]
        case _:
            return []


def _was_judged(run: RunConfig, buffer: GroupBuffer, collection: GroupCollection, group: OpenGroup) -> bool:
    group_id = group.start.group_id
    if not group.is_complete or any(group_id in each.open_groups for each in buffer.state.steps.values()):
        return False
    if group_id in collection.rows:
        return True
    # Groups that are left over after the last step is full are never judged.
    return (
        judge_group(select_fresh_trajectories(group.finished, collection.step, run.rl), compute_keep_count(run))
        != "accepted"
    )


def _build_judged_group(run: RunConfig, collection: GroupCollection, group: OpenGroup) -> JudgedGroup:
    return JudgedGroup(
        step=collection.step,
        group_id=group.start.group_id,
        seed=group.start.seed,
        fresh=select_fresh_trajectories(group.finished, collection.step, run.rl),
        rows=collection.rows.get(group.start.group_id, ()),
    )


def _list_batches(effects: Sequence[Send]) -> list[BatchReady]:
    return [effect.message for effect in effects if isinstance(effect.message, BatchReady)]


def _check_effects(log: Path, seq: int, effects: Sequence[Send], decision: Decision | None) -> None:
    """Compare with the log's fingerprint. Raises UnusableInput."""
    if decision is None or any(isinstance(effect.message, StartGroup) for effect in effects):
        return  # undecided; or it names a problem, which is unknown here
    if compute_fingerprint(encode_effects(BUFFER, effects)) != decision.effects:
        raise UnusableInput(
            f"{log}: event {seq} sent a batch to the learner that differs from the recomputed one; config.toml or the "
            "code has changed since the run. `asterism log replay --verify` shows the first difference"
        )
