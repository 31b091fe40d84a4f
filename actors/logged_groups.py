"""The groups of each step, as the head's event log has them: the group buffer takes them in once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from actors.decider_loop import REFUSED, encode_effects, fingerprint
from actors.problems import Problems
from actors.wiring import HEAD, head_deciders
from bus.event_log import Decision
from bus.event_reading import envelope_of, read_events
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
from configs.schema import Run
from policies.collection import Collection, OpenGroup
from policies.decider import Send
from policies.filtering import kept_of, verdict_on, young_of
from policies.group_buffer import GroupBuffer, Problem
from policies.refiltering import JudgedGroup

_KINDS = (
    *("RunStarted", "StepRequested", "StepCollected", "EvaluationRequested"),
    *("TrajectoryFinished", "TrajectoryFailed", "TrajectoryAborted"),
)
_NOT_ASKED = Problem("", "", b"")  # which problem it is decides nothing of what is kept


class StepGroups(NamedTuple):
    step: int
    groups: Sequence[JudgedGroup]
    batch: BatchReady  # what the learner got


def steps_of(run: Run, folder: RunFolder) -> Iterator[StepGroups]:
    """Every step whose batch went out, as it did; a step that a resumed run did again comes again. One of which the log
    does not have all events (any more) is left out.

    Raises UnusableInput where there is no log, or where what went out is not what is found now.
    """
    log = folder.events / f"{HEAD}.sqlite"
    if not log.exists():
        raise UnusableInput(f"{log}: there is no event log; was the run started with log.events = false?")
    buffer = head_deciders(run, Problems([_NOT_ASKED], [_NOT_ASKED] * _questions(run, log)))["buffer"]
    assert isinstance(buffer, GroupBuffer)
    judged: dict[int, list[JudgedGroup]] = {}
    collected: StepCollected | None = None
    for event, decision in read_events(log, kinds=_KINDS):
        message = envelope_of(log, event).message
        if isinstance(message, StepCollected):
            collected = message
        if event.actor != "buffer":
            continue
        if isinstance(message, RunStarted):
            judged.clear()
        candidates = _candidates(buffer, message)
        try:
            effects = buffer.decide(event.time, message)
        except ProtocolError:
            if decision is None or decision.effects != REFUSED:
                _go_on_after(run, buffer, event.time, message, collected)
            continue
        for collection, group in candidates:
            if _was_judged(run, buffer, collection, group):
                judged.setdefault(collection.step, []).append(_judged(run, collection, group))
        for batch in _batches(effects):
            _check(log, event.seq, effects, decision)
            yield StepGroups(batch.step, judged.pop(batch.step, []), batch)


def _go_on_after(
    run: Run, buffer: GroupBuffer, now: float, message: AnyMessage, collected: StepCollected | None
) -> None:
    """The run took what is refused here: events of the step before are gone from the log. The buffer begins this step as
    a resumed run does; where steps overlap it would begin other groups than the run did, and finds none of them."""
    if not isinstance(message, StepRequested) or collected is None or run.rl.max_staleness:
        return
    if collected.step == message.step - 1:
        buffer.decide(now, RunStarted(collected.step, collected.cursor))
        buffer.decide(now, message)


def _questions(run: Run, log: Path) -> int:
    """How many an evaluation asks: the run's data may have fewer than its configuration names."""
    ends = (envelope_of(log, event).message for event, _ in read_events(log, kinds=["EvaluationFinished"]))
    asked = {end.questions for end in ends if isinstance(end, EvaluationFinished)}
    return max(asked, default=run.evaluation.questions)


def _candidates(buffer: GroupBuffer, message: AnyMessage) -> list[tuple[Collection, OpenGroup]]:
    """The groups that may be judged now: that of a trajectory which ends, or all that are left over as a step begins."""
    steps: Mapping[int, Collection] = buffer.state.steps
    match message:
        case TrajectoryFinished() | TrajectoryFailed() | TrajectoryAborted():
            group_id = message.group_id
            return [(each, each.open[group_id]) for each in steps.values() if group_id in each.open]
        case StepRequested(step=step) if step in steps:
            return [(steps[step], group) for group in steps[step].open.values() if group.is_complete]
        case _:
            return []


def _was_judged(run: Run, buffer: GroupBuffer, collection: Collection, group: OpenGroup) -> bool:
    group_id = group.start.group_id
    if not group.is_complete or any(group_id in each.open for each in buffer.state.steps.values()):
        return False
    if group_id in collection.rows:
        return True
    # What is left over when the last step has enough is judged by nobody.
    return verdict_on(young_of(group.finished, collection.step, run.rl), kept_of(run)) != "accepted"


def _judged(run: Run, collection: Collection, group: OpenGroup) -> JudgedGroup:
    return JudgedGroup(
        step=collection.step,
        group_id=group.start.group_id,
        seed=group.start.seed,
        young=young_of(group.finished, collection.step, run.rl),
        rows=collection.rows.get(group.start.group_id, ()),
    )


def _batches(effects: Sequence[Send]) -> list[BatchReady]:
    return [effect.message for effect in effects if isinstance(effect.message, BatchReady)]


def _check(log: Path, seq: int, effects: Sequence[Send], decision: Decision | None) -> None:
    """By the log's fingerprint. Raises UnusableInput."""
    if decision is None or any(isinstance(effect.message, StartGroup) for effect in effects):
        return  # it was not decided; or it names a problem, which is not known here
    if fingerprint(encode_effects(f"{HEAD}/buffer", effects)) != decision.effects:
        raise UnusableInput(
            f"{log}: by event {seq} a step's rows went to the learner, and they are not those that are found now: "
            "was its config.toml changed, or the program? `asterism log replay --verify` shows the first difference"
        )
